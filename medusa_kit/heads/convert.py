"""Converts heads on disk from one format to another."""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from medusa_kit.base.files import lasting_name, resolve
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import CheckpointError, ConfigError, did_you_mean
from medusa_kit.files import atomic_write, write_json
from medusa_kit.heads import checkpoint
from medusa_kit.heads.config import FORMAT
from medusa_kit.heads.foreign import (
    KIT_FORMAT,
    check_sizes,
    from_kit,
    scale_note,
    simplified,
    to_kit,
)
from medusa_kit.heads.formats import numbered, prefixed, vllm
from medusa_kit.heads.formats.engines import check_shape
from medusa_kit.heads.formats.files import CONFIG_NAME
from medusa_kit.heads.formats.neutral import ForeignHeads
from medusa_kit.heads.formats.recognise import ADAPTER_CONFIG, read_foreign
from medusa_kit.heads.formats.target import LAYOUTS, Target, Written
from medusa_kit.heads.weights_base import check_weights_base, metadata_of
from medusa_kit.paths import expanded
from medusa_kit.settings.engine import OWN_MODELS

INDEX_NAME = "model.safetensors.index.json"


def _write_kit(heads: ForeignHeads, target: Target) -> Written:
    if target.base is None:
        raise ConfigError(
            "medusa-kit heads carry the fingerprint of their base", hint="name it as --model"
        )
    config, tensors = to_kit(heads, target.base)
    return Written(
        {"format": FORMAT, **config.as_dict()},
        {checkpoint.WEIGHTS_NAME: tensors},
        metadata=metadata_of(config),
    )


WRITERS: dict[str, Callable[[ForeignHeads, Target], Written]] = {
    "vllm": vllm.write,
    "tgi": numbered.write_tgi,
    "lorax": numbered.write_lorax,
    "trt-llm": numbered.write_trt_llm,
    "mlc": prefixed.write_mlc,
    "modelopt": prefixed.write_modelopt,
    "fd-v1": numbered.write_fd_v1,
    "fd-v2": numbered.write_fd_v2,
    KIT_FORMAT: _write_kit,
}
TWO_LAYOUTS = ("tgi", "lorax")
FOLDER_SOURCES = ("folder", "gguf", "embedded")  # sources of bases that have one
# The only files that a folder may hold for --force to replace it.
REPLACEABLE = {
    CONFIG_NAME, INDEX_NAME, ADAPTER_CONFIG, checkpoint.WEIGHTS_NAME, numbered.SAFETENSORS,
    prefixed.WEIGHTS, "adapter_model.safetensors",
}  # fmt: skip


def check_call(source: Path, folder: Path, to: str, layout: str, force: bool) -> None:
    """Raises ConfigError for wrong arguments, before any file is read."""
    if to not in WRITERS:
        hint = did_you_mean(to, WRITERS)
        if to == "fd-merged":
            hint = "heads in a base's shards can be read but are written separately: --to fd-v1"
        raise ConfigError(
            f"format {to!r} cannot be written; expected one of {', '.join(WRITERS)}", hint=hint
        )
    if layout not in LAYOUTS or (layout != "auto" and to not in TWO_LAYOUTS):
        raise ConfigError(
            f"layout {layout!r} of format {to}: expected one of {', '.join(LAYOUTS)} for "
            f"{' and '.join(TWO_LAYOUTS)}, and auto for every other format"
        )
    _check_folder(source.resolve(), folder.resolve(), force)


def check_source(source: Path, to: str) -> None:
    """Raises ConfigError or CheckpointError for heads that are not there, and for medusa-kit heads
    that `to` cannot hold, as far as their config alone says so."""
    if source.exists() and not checkpoint.says_ours(source):
        return
    config = checkpoint.read_config(source)
    if to != KIT_FORMAT:
        check_shape(config, to)
    elif config.kind != "medusa":
        raise ConfigError(
            f"{source} holds medusa-kit heads already, of kind {config.kind}",
            hint="copy the folder to have it twice",
        )


def _check_folder(source: Path, folder: Path, force: bool) -> None:
    if folder == source or folder in source.parents or source in folder.parents:
        raise ConfigError(f"{folder} would overwrite {source} or be inside it")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", hint="name a folder")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names and not force:
        raise ConfigError(f"{folder} is not empty", hint="name another, or replace it with --force")
    if others := sorted(names - REPLACEABLE):
        raise ConfigError(
            f"{folder} is not replaced: it holds {others[0]}, which does not belong to heads",
            hint="name another folder",
        )
    if names and not _holds_heads(folder):
        raise ConfigError(
            f"{folder} is not replaced: it holds no heads of its own, such as a whole model",
            hint="name another folder",
        )


def _holds_heads(folder: Path) -> bool:
    if checkpoint.says_ours(folder):
        return True
    try:
        heads = read_foreign(folder, quiet=True)
    except CheckpointError:  # damaged, or of a format that is not known
        return False
    return heads is not None and heads.format != "fd-merged"


def convert(
    source: Path,
    folder: Path,
    to: str,
    *,
    base: BaseModel | None = None,
    base_name: str | None = None,
    layout: str = "auto",
    force: bool = False,
) -> tuple[ForeignHeads, Written]:
    """Write the heads in `source` into `folder` as `to`; returns what was read and written.

    `base`: needed where the target holds what the source takes from its base, and to check sizes
    (for medusa-kit heads the fingerprint). `base_name`: the base's name in the target's config and
    command; by default the config has the name in the heads, and the command the folder or Hub
    id of `base`, as has a config where no other engine knows the name.
    Raises ConfigError (the call, or a base is needed), CheckpointError (unreadable, or the target
    cannot hold these heads), IncompatibleBaseError.
    """
    source, folder = expanded(source), expanded(folder)
    check_call(source, folder, to, layout, force)
    heads = _read(source, base, to)
    notes = list(heads.notes)
    if base is not None:
        check_sizes(heads, base)
        heads = simplified(heads, base)
        notes += [note for note in [scale_note(base)] if note]
    name = base_name or heads.base_name or (_name_of(base) if base else None)
    loadable_name = base_name or _loadable_name(base, heads)
    if name is not None and _only_kit_loads(name):
        name = loadable_name or name
    written = WRITERS[to](heads, Target(to, folder, base, name, layout, loadable_name))
    foreign = to != KIT_FORMAT
    if foreign and name is not None and _only_kit_loads(name) and name in written.config.values():
        written.notes.append(
            f"the config names the base {name!r}, which {to} cannot load: name a Hub id or a "
            "folder of it as --base-name"
        )
    _check_numbers(source, written)
    written.notes[:0] = notes
    _keep_adapter(source, to, heads, written)
    if base is None:
        written.notes.append("no base was named, so the sizes were not checked")
    _save(written, source, folder)
    return heads, written


def _read(source: Path, base: BaseModel | None, to: str) -> ForeignHeads:
    if not checkpoint.says_ours(source) and (foreign := read_foreign(source)) is not None:
        return foreign
    check_source(source, to)
    config, tensors = checkpoint.read_heads(source)
    check_weights_base(source / checkpoint.WEIGHTS_NAME, config)
    if base is not None:
        checkpoint.check_base(config, base, force=False)
    return from_kit(config, tensors)


def _check_numbers(source: Path, written: Written) -> None:
    """Raises CheckpointError for NaN and infinite numbers."""
    for tensors in written.files.values():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise CheckpointError(
                    f"{source} holds heads with NaN or infinite numbers (in what is {name} in the "
                    "format to write)",
                    hint="the file is damaged, or their training diverged",
                )


def _only_kit_loads(name: str) -> bool:
    """Whether no other engine can load a base by this name."""
    return name in OWN_MODELS or name.endswith(".gguf")


def _loadable_name(base: BaseModel | None, heads: ForeignHeads) -> str | None:
    """The base's folder or Hub id for another engine; None where that could not load it."""
    if base is None:
        name = heads.base_name or ""
        return None if name == "" or _only_kit_loads(name) else name
    if base.info.source in ("hub", "memory"):
        return _name_of(base)
    return resolve(base.info.name)[1] if base.info.source in FOLDER_SOURCES else None


def _name_of(base: BaseModel) -> str:
    return lasting_name(base.info.name, base.info.source)


def _keep_adapter(source: Path, to: str, heads: ForeignHeads, written: Written) -> None:
    if not (source / ADAPTER_CONFIG).is_file():
        return
    if to == "lorax":
        written.copies.append(ADAPTER_CONFIG)
        return
    written.notes.append(
        f"{source} holds a LoRA adapter that the heads were trained with, and {to} cannot hold it: "
        "merge it into the base that you serve"
    )


def _save(written: Written, source: Path, folder: Path) -> None:
    with atomic_write(folder) as temporary:
        temporary.mkdir()
        for name, tensors in written.files.items():
            save_file(_unshared(tensors), temporary / name, metadata=written.metadata)
            (temporary / name).chmod(0o644)
        write_json(temporary / CONFIG_NAME, written.config)
        if written.index is not None:
            total = sum(t.numel() * t.element_size() for file_tensors in written.files.values()
                        for t in file_tensors.values())  # fmt: skip
            write_json(
                temporary / INDEX_NAME,
                {"metadata": {"total_size": total}, "weight_map": written.index},
            )
        for name in written.copies:
            shutil.copyfile(source / name, temporary / name)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where two share storage, which safetensors refuses to write."""
    storages: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_whole = (
            tensor.is_contiguous() and storage.nbytes() == tensor.numel() * tensor.element_size()
        )
        if not is_whole or storage.data_ptr() in storages:
            tensor = tensor.detach().clone().contiguous()
        storages.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result
