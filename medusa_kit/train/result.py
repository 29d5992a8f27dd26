"""Writes the results of a run: heads, and for Medusa-2 the model or adapter that contains them.

Weights that ZeRO-3 has spread over processes are gathered before they are written.
"""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_kit.base import adapters
from medusa_kit.base.faults.finite import damage_in
from medusa_kit.base.files import lasting_name
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import VARIANT_KEY, BaseModel
from medusa_kit.base.origin import HEADS
from medusa_kit.errors import NotFiniteError
from medusa_kit.files import atomic_write, parse_json, write_json
from medusa_kit.heads import MedusaHeads, save_heads
from medusa_kit.heads.checkpoint import (
    PAIRED_FOLDER,
    STORED_DTYPES,
    WEIGHTS_NAME,
    check_replaced,
    read_heads,
    read_stored,
    tensors_to_save,
    write_tensors,
)
from medusa_kit.heads.config import HeadsConfig
from medusa_kit.heads.derived import drop_derived
from medusa_kit.heads.digest import heads_digest
from medusa_kit.heads.int8 import expanded
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.together import moved_together
from medusa_kit.train.engine import TrainingEngine
from medusa_kit.train.processes import distributed
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.run.own_files import BEGUN, PROVENANCE, keep_theirs, note_files
from medusa_kit.train.run.provenance import provenance


def keep(
    engine: TrainingEngine,
    base: BaseModel,
    recipe: TrainRecipe,
    folder: RunFolder,
    ran: dict[str, Any] | None = None,
) -> None:
    """Write the trained weights as they are now, replacing those kept before. `ran`: how far the
    training has come."""
    heads = engine.module.heads
    moved = [p for p in engine.module.parameters() if p.requires_grad]
    whole_model = recipe.trains_whole_base
    own = [] if base.is_light else base.output_weights()  # which may be spread over processes
    needed = list(engine.module.parameters()) if whole_model else [*moved, *own]
    with engine.whole(needed):
        if distributed.is_main():
            record = provenance(recipe, {**folder.origin, BEGUN: folder.date}, ran)
            if recipe.stage == "medusa2":
                _save_joint(base, heads, recipe, record)
            else:
                _save_heads(heads, recipe, folder.heads, heads.config, record)
    distributed.barrier()


def joint_folder(recipe: TrainRecipe) -> Path:
    """The folder of Medusa-2's model or adapter, with the heads inside."""
    name = "model" if recipe.joint_options.moves == "full" else "adapter"
    return Path(recipe.output_dir) / name


def heads_folder(recipe: TrainRecipe, folder: RunFolder) -> Path:
    """The folder that the heads are kept in."""
    return joint_folder(recipe) / PAIRED_FOLDER if recipe.stage == "medusa2" else folder.heads


def save_merged(recipe: TrainRecipe) -> Path:
    """Write base and adapter as one merged model, with the heads inside; returns its folder."""
    source, target = joint_folder(recipe), Path(recipe.output_dir) / "merged"
    merged = load_base_model(str(source), dtype=recipe.base.dtype, device="cpu")
    with atomic_write(target) as temporary:
        merged.model.save_pretrained(temporary)
        if merged.tokenizer is not None:
            merged.tokenizer.save_pretrained(temporary)
        _copy_heads(source / PAIRED_FOLDER, temporary / PAIRED_FOLDER, merged, str(target))
        note_files(temporary)
        keep_theirs(target, temporary)
    return target


def _copy_heads(source: Path, target: Path, merged: BaseModel, name: str) -> None:
    """Copy the heads with the merged model's name, and its fingerprint, which is that of the
    weights on disk."""
    shutil.copytree(source, target)
    config, _ = read_heads(target)
    own = replace(config, base_model_name=name, base_fingerprint=merged.fingerprint())
    write_tensors(target, own, read_stored(target / WEIGHTS_NAME))


def _save_heads(
    heads: MedusaHeads,
    recipe: TrainRecipe,
    folder: Path,
    config: HeadsConfig,
    record: str,
) -> None:
    """`record`: the provenance, written beside them. Raises NotFiniteError, before anything is
    written, for weights that would be no finite numbers in the file."""
    dtype = STORED_DTYPES[recipe.heads.save_dtype or recipe.base.dtype]
    heads = heads.with_heads(heads.num_heads + recipe.heads.further_heads)
    config, tensors = replace(config, num_heads=heads.num_heads), tensors_to_save(heads, dtype)
    if (found := damage_in(tensors.items())) is not None:
        raise NotFiniteError(
            f"heads cannot be written to {folder}: {found}",
            hint="their numbers are too large for that dtype: set heads.save_dtype to a wider one",
        )
    digest = heads_digest(config, expanded(folder / WEIGHTS_NAME, tensors))
    check_replaced(folder)
    drop_derived(folder, digest)
    with moved_together(folder) as new:
        save_heads(heads, new, dtype, config)
        write_json(new / PROVENANCE, {HEADS: digest, **parse_json(record)})


def _save_joint(base: BaseModel, heads: MedusaHeads, recipe: TrainRecipe, record: str) -> None:
    """Write model or adapter with the heads inside, as one folder that loads in one step."""
    target, info = joint_folder(recipe), base.info
    with atomic_write(target) as temporary:
        if recipe.joint_options.moves == "full":
            variant = _variant(base.model)
            config = base.model.config.get_text_config()
            own = base.fingerprint(variant)
            setattr(config, VARIANT_KEY, variant)
            base.model.save_pretrained(temporary)
            delattr(config, VARIANT_KEY)
        else:
            adapters.save_adapter(base.model, temporary, {
                "base_model": lasting_name(info.name, info.source),
                "revision": info.revision,
                "base_fingerprint": info.fingerprint,
            })  # fmt: skip
            own = str(base.adapted_fingerprint(adapters.variant_of(temporary)))
        if base.tokenizer is not None:
            base.tokenizer.save_pretrained(temporary)
        named = replace(heads.config, base_model_name=str(target), base_fingerprint=own)
        _save_heads(heads, recipe, temporary / PAIRED_FOLDER, named, record)
        note_files(temporary)
        keep_theirs(target, temporary)


def _variant(model: Any) -> str:
    """The mark of these weights: a digest of the beginning of every tensor."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().flatten()[:1024].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
