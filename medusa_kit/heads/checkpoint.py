"""Heads on disk: `heads.safetensors`, and a `config.json` that describes them and their base.

Loading checks every tensor's name and shape and the base's fingerprint, and reports differences.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_kit import console
from medusa_kit.base.faults.finite import check_fit, check_numbers
from medusa_kit.base.fingerprint import OLD_NOTE, Match, compare
from medusa_kit.base.model import BaseModel
from medusa_kit.base.placement import DTYPES
from medusa_kit.errors import (
    DID_YOU_MEAN,
    CheckpointError,
    ConfigError,
    IncompatibleBaseError,
    unknown_value,
    unreadable,
)
from medusa_kit.files import atomic_write, near_file, parse_json, write_json
from medusa_kit.heads import foreign
from medusa_kit.heads.blocks import RecurrentNetwork
from medusa_kit.heads.config import (
    CONFIG_NAME,
    FORMAT,
    KINDS,
    PROJECTIONS,
    HeadsConfig,
    check_mlp_size,
    check_reduced_ids,
)
from medusa_kit.heads.digest import heads_digest
from medusa_kit.heads.formats.recognise import read_foreign
from medusa_kit.heads.int8 import expanded as from_int8
from medusa_kit.heads.int8 import rounded as in_int8
from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.undrawn import Undrawn
from medusa_kit.heads.weights_base import check_weights_base, metadata_of
from medusa_kit.outputs import json_object
from medusa_kit.paths import expanded
from medusa_kit.settings.engine import OWN_MODELS
from medusa_kit.settings.recipe import ROOTED_WHY
from medusa_kit.together import moved_together
from medusa_kit.usual_device import on_usual_device

WEIGHTS_NAME = "heads.safetensors"
OF_OWN_MODEL = "{} is a model; --heads auto, the default, finds the heads that come with the kit"
PAIRED_FOLDER = "medusa_heads"  # heads inside their base's folder
STORED_DTYPES = {**DTYPES, "int8": torch.int8}
SHARED = "recurrent."  # how the names of tensors that all heads share begin


@on_usual_device
def save_heads(
    heads: MedusaHeads,
    folder: Path,
    dtype: torch.dtype | None = None,
    config: HeadsConfig | None = None,
) -> None:
    """Write heads into `folder` (made if missing; other files in it stay).

    `dtype`: of the stored weights, also int8 (int8.py); by default theirs. `config`: by default
    theirs. Raises ConfigError for the folder of a model, whose config would be replaced.
    """
    folder = expanded(folder)
    check_replaced(folder)
    write_tensors(folder, config or heads.config, tensors_to_save(heads, dtype))


def write_tensors(folder: Path, config: HeadsConfig, tensors: dict[str, Tensor]) -> None:
    with moved_together(folder) as new:
        with atomic_write(new / WEIGHTS_NAME) as temporary:
            save_file(tensors, temporary, metadata=metadata_of(config))
        write_config(new, config)


def check_replaced(folder: Path) -> None:
    """Raises ConfigError for the folder of a model, whose config heads would replace."""
    there = json_object(folder / CONFIG_NAME)
    if there is not None and there.get("format") != FORMAT:
        raise ConfigError(
            f"{folder / CONFIG_NAME} is not that of medusa-kit heads, and would be replaced",
            hint="name another folder",
        )


def tensors_to_save(heads: MedusaHeads, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of a file of these heads; `dtype`: of those with a point, by default theirs; with
    int8 only matrices change."""
    if dtype is torch.int8:
        return in_int8(heads.state_dict())
    return {
        name: (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in heads.state_dict().items()
    }


def write_config(folder: Path, config: HeadsConfig) -> None:
    write_json(folder / CONFIG_NAME, {"format": FORMAT, **config.as_dict()})


def says_ours(folder: Path) -> bool:
    """Whether the config in `folder` is that of medusa-kit heads, valid or not."""
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():  # a pipe could be read for ever
        return False
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def read_config(folder: Path) -> HeadsConfig:
    """The config of the heads in `folder`. Raises CheckpointError, which names the wrong key."""
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():
        runs = [Path(folder) / inner for inner in ("heads", "run/heads")]  # of a recipe, of --quick
        within = next((str(one) for one in runs if (one / CONFIG_NAME).is_file()), None)
        otherwise = "train some with `medusa-kit train`, or name the folder that holds them"
        missing = f"{CONFIG_NAME} is missing"
        if not Path(folder).exists():
            missing, otherwise = "there is no such folder", near_file(Path(folder), otherwise)
        raise CheckpointError(
            f"no heads at {folder}: {missing}",
            hint=OF_OWN_MODEL.format(folder)
            if str(folder) in OWN_MODELS
            else DID_YOU_MEAN.format(within)
            if within
            else otherwise,
        )
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{path} does not describe medusa-kit heads",
            hint="the tensors are medusa-kit's, so they need the config that was saved with them",
        )
    return _config_from(raw, path)


def _config_from(raw: dict[str, Any], path: Path) -> HeadsConfig:
    _refuse_prefix_layer(path, raw)
    known = {field.name for field in fields(HeadsConfig)}
    if unknown := sorted(set(raw) - known):
        raise CheckpointError(f"{path} has unknown keys: {', '.join(unknown)}")
    try:
        config = HeadsConfig(**raw)
    except TypeError as error:
        raise CheckpointError(f"{path} lacks a key: {error}") from error
    if raw.get("kind") == "rooted":
        raise CheckpointError(
            f"{path}: heads of kind 'rooted' are no longer there: {ROOTED_WHY}",
            hint="train them again with kind 'hydra' or 'recurrent'",
        )
    _check_choice(path, "head kind", config.kind, KINDS)
    _check_choice(path, "projection", config.projection, PROJECTIONS)
    for name in ("num_heads", "num_blocks", "hidden_size", "vocab_size"):
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{path}: {name} is {value!r}, expected a whole number from 1 on")
    if not isinstance(config.encoding, str | None):
        raise CheckpointError(f"{path}: encoding is {config.encoding!r}, expected text")
    if not isinstance(config.base_config, dict | None):
        raise CheckpointError(
            f"{path}: base_config is a {type(config.base_config).__name__}, expected an object"
        )
    try:
        check_mlp_size(config.kind, config.mlp_size)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.message}") from error
    return config


def _refuse_prefix_layer(path: Path, raw: dict[str, Any]) -> None:
    """Versions up to 0.1 had heads that read a decoder layer over the whole prefix."""
    number, sizes = raw.pop("prefix_layers", 0), raw.pop("prefix_sizes", None)
    if number or sizes:
        raise CheckpointError(
            f"{path}: these heads have a prefix layer (prefix_layers {number!r}), which no longer "
            "runs: it made decoding slower",
            hint="train heads without it, for example of kind 'recurrent'",
        )


def _check_choice(path: Path, what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise unknown_value(f"{path}: {what}", value, known, kind=CheckpointError)


@on_usual_device
def load_heads(
    folder: Path, base: BaseModel, force: bool = False, pickles: bool = True
) -> MedusaHeads:
    """Heads from `folder`, in the base's dtype and on its device, ready to draft.

    A checkpoint of another engine is recognised and converted in memory (foreign.py).
    `force` puts them on a base with another fingerprint; sizes must fit all the same. `pickles`:
    whether checkpoints that are pickles of plain tensors are opened.
    Raises CheckpointError (missing, cut off, wrong tensors), IncompatibleBaseError (wrong base).
    """
    folder = expanded(folder)
    base.changes()  # so that its fingerprint is that of its weights as they are now
    console.stage("reading the heads")
    if not says_ours(folder) and (found := read_foreign(folder, pickles=pickles)) is not None:
        return foreign.loaded(found, base, folder)
    config = read_config(folder)
    check_base(config, base, force)
    check_weights_base(folder / WEIGHTS_NAME, config, force)
    tensors = read_tensors(folder / WEIGHTS_NAME)
    _check_columns(config, tensors.get("column_ids"), folder / WEIGHTS_NAME)
    _check_number(config, tensors, folder / WEIGHTS_NAME)
    expected = _shared_tensors(config, base.embedding_size)
    shared = {name: one for name, one in tensors.items() if name.startswith(SHARED)}
    _check_tensors(expected, shared, folder / WEIGHTS_NAME)  # before memory is taken for them
    with Undrawn():
        heads = MedusaHeads(config, base, tensors.get("column_ids"))
    _check_tensors(heads.state_dict(), tensors, folder / WEIGHTS_NAME)
    check_fit(folder / WEIGHTS_NAME, tensors, base.dtype)
    return heads.use(tensors)


def read_whole(folder: Path) -> HeadsConfig:
    """The config in `folder`, whose weights are all there as far as that shows without a base.
    Raises CheckpointError."""
    config, path = read_config(folder), Path(folder) / WEIGHTS_NAME
    tensors = read_tensors(path)
    _check_columns(config, tensors.get("column_ids"), path)
    _check_number(config, tensors, path)
    return config


def check_base(config: HeadsConfig, base: BaseModel, force: bool) -> None:
    """Raises IncompatibleBaseError, with what differs. For another quantisation of the heads' base
    only what quantisation leaves alone is compared, for an old fingerprint the part it has."""
    info = base.info
    match = compare(config.base_fingerprint, info.fingerprint)
    pairs: dict[str, tuple[object, object]] = {
        "hidden size": (config.hidden_size, info.hidden_size),
        "vocabulary size": (config.vocab_size, info.vocab_size),
    }
    if not force:
        pairs["architecture"] = (config.base_model_type, info.model_type)
        if match is Match.OTHER:
            pairs["fingerprint"] = (config.base_fingerprint, info.fingerprint)
    differing = [f"{what} {ours!r} ≠ {theirs!r}" for what, (ours, theirs) in pairs.items()
                 if ours != theirs]  # fmt: skip
    if differing:
        raise IncompatibleBaseError(
            f"these heads were trained for {config.base_model_name!r} and do not fit "
            f"{info.name!r}: {'; '.join(differing)} (heads ≠ base)",
            hint="load the base they were trained on"
            + (
                ""
                if force
                else "; --force uses them where it is the same model with changed weights"
            ),
        )
    if match is Match.OLD:
        console.note(f"heads for {config.base_model_name!r}: {OLD_NOTE}")
    if match is Match.SAME_NORMS:
        console.note(
            f"these heads were trained for {config.base_model_name!r}, of which {info.name!r} is "
            "another quantisation, or which was fine-tuned since with norms and biases left alone: "
            "text stays exact, acceptance may be lower"
        )
    elif config.base_quantized != info.quantized:
        console.warn(
            "the heads were trained on a "
            f"{'quantised' if config.base_quantized else 'full-precision'} copy of this base: "
            "text stays exact, acceptance may be lower"
        )


def read_heads(folder: Path) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Config and tensors as stored, without a base; blocks and columns are checked."""
    config, path = read_config(folder), Path(folder) / WEIGHTS_NAME
    tensors = read_tensors(path)
    _check_columns(config, tensors.get("column_ids"), path)
    _check_number(config, tensors, path)
    if config.kind == "medusa":
        _check_tensors(_medusa_tensors(config, tensors), tensors, path)
    return config, tensors


def stored_digest(folder: Path) -> str | None:
    """The digest of the heads in `folder`; None where there are none of ours that can be read."""
    try:
        return heads_digest(read_config(folder), read_tensors(Path(folder) / WEIGHTS_NAME))
    except CheckpointError:
        return None


def _medusa_tensors(config: HeadsConfig, found: dict[str, Tensor]) -> dict[str, Tensor]:
    D, R = config.hidden_size, config.reduced_size or config.vocab_size
    expected: dict[str, Tensor] = {}

    def shaped(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device="meta")

    if config.reduced_size is not None:
        expected["column_ids"] = torch.empty(R, dtype=torch.int64, device="meta")
    for i in range(config.num_heads):
        for j in range(config.num_blocks):
            expected[f"blocks.{i}.{j}.linear.weight"] = shaped(D, D)
            expected[f"blocks.{i}.{j}.linear.bias"] = shaped(D)
        if config.projection == "own":
            expected[f"projections.{i}.weight"] = shaped(R, D)
            if f"projections.{i}.bias" in found:
                expected[f"projections.{i}.bias"] = shaped(R)
    return expected


def _shared_tensors(config: HeadsConfig, embedding_size: int) -> dict[str, Tensor]:
    """Those of the network that recurrent heads share, by their names, without memory."""
    if config.kind != "recurrent":
        return {}
    try:
        network = RecurrentNetwork(config, embedding_size, device="meta")
    except (RuntimeError, TypeError) as error:  # more numbers than torch can count
        raise CheckpointError(f"no tensor has the sizes of these heads: {error}") from error
    return {SHARED + name: tensor for name, tensor in network.state_dict().items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of heads, those in eight bits as float32. Raises CheckpointError."""
    tensors = from_int8(path, read_stored(path))
    check_numbers(path, tensors)
    return tensors


def read_stored(path: Path) -> dict[str, Tensor]:
    """The same as they are stored, whatever their numbers."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", hint="the folder is incomplete: copy it again")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise unreadable(error)(
            f"{path} cannot be read: {error}", hint="the file is cut off or damaged: copy it again"
        ) from error


def _check_columns(config: HeadsConfig, ids_R: Tensor | None, path: Path) -> None:
    """Checks column ids before anything else, since the heads' shapes depend on them."""
    size = None if ids_R is None else tuple(ids_R.shape)
    if size != (None if config.reduced_size is None else (config.reduced_size,)):
        raise CheckpointError(
            f"{path} has column_ids of shape {size}; the config's reduced_size is "
            f"{config.reduced_size}"
        )
    if ids_R is not None and ids_R.dtype != torch.int64:
        raise CheckpointError(f"{path} has column_ids of {ids_R.dtype}, expected torch.int64")
    try:
        check_reduced_ids(config.projection, ids_R, config.vocab_size)
    except ConfigError as error:
        raise CheckpointError(f"{path}: column_ids: {error.message}") from error


def _check_number(config: HeadsConfig, found: dict[str, Tensor], path: Path) -> None:
    """Checks that the file can hold the heads that the config counts, before memory is taken for
    them: a damaged number could ask for all there is."""
    networks = 1 if config.kind == "recurrent" else config.num_heads
    if (blocks := networks * config.num_blocks) > len(found):
        raise CheckpointError(
            f"{path} does not match its config: {config.num_heads} heads of {config.num_blocks} "
            f"blocks need at least {blocks} tensors, and it has {len(found)}"
        )


def _check_tensors(expected: dict[str, Tensor], found: dict[str, Tensor], path: Path) -> None:
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    problems += [
        f"{name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if problems:
        raise CheckpointError(f"{path} does not match its config: {'; '.join(problems[:8])}")
