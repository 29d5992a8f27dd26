"""What a run depends on besides its recipe, kept with its checkpoints and compared on resuming."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base.fingerprint import OLD_NOTE, Match, compare
from medusa_kit.base.model import BaseModel
from medusa_kit.base.origin import CONFIG, WORDS
from medusa_kit.base.origin import compare as compare_origins
from medusa_kit.base.quantization import raw_bytes
from medusa_kit.base.tokenizer.encoding_digest import ENCODING, Encodings
from medusa_kit.base.tokenizer.encoding_digest import compare as compare_encodings
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.heads import MedusaHeads
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.features.rows import HeadTargets
from medusa_kit.train.processes import distributed
from medusa_kit.train.run.checkpoint_files import FILES

TRAINED_IN = "trained_in"  # the dtype of what is updated
GO_ON_AS_BEGUN = "finish that run with the version that began it, or add --fresh to start over"
DATA, HELD_OUT, EARLIER, COLUMNS, LEARNED = "data", "held_out", "heads_from", "columns", "learned"
RESTORE = "restore the data files, or add --fresh to start over"


class _Part(NamedTuple):
    """What a digest is of, in words: what is said where it is another, and what to do."""

    name: str
    changed: str
    hint: str


# In the order in which they are told.
PARTS = {
    DATA: _Part("data", "the data changed", RESTORE),
    HELD_OUT: _Part("rows held out", "the rows held out changed", RESTORE),
    EARLIER: _Part(
        "earlier heads", "the heads in train.heads_from changed",
        "put back the heads that it began with, or add --fresh to start over",
    ),
    COLUMNS: _Part(
        "tokens of the reduced projection", "the tokens of the reduced projection changed",
        "resume with the versions that began it, or add --fresh to start over",
    ),
    LEARNED: _Part(
        "encoding of the answers",
        "what the sources' .meta.json say of how their text was encoded changed",
        "restore these files, or add --fresh to start over",
    ),
}  # fmt: skip


def identity_of(
    base: BaseModel,
    training: Sequence[HeadTargets],
    held_out: Sequence[HeadTargets],
    heads: MedusaHeads,
    recipe: TrainRecipe,
) -> dict[str, Any]:
    """All of it, as it is now. `heads`: before any update."""
    earlier = recipe.train.heads_from is not None
    return {
        "base": base.info.fingerprint,
        CONFIG: base.computation,
        ENCODING: base.encoding,
        DATA: rows_digest(training),
        HELD_OUT: rows_digest(held_out),
        EARLIER: tensors_digest(heads.state_dict()) if earlier else None,
        COLUMNS: None if heads.column_ids is None else tensors_digest({"": heads.column_ids}),
        LEARNED: heads.config.encoding is not None,  # whether it is known
        "processes": distributed.world(),
        TRAINED_IN: "float32",
    }


def rows_digest(items: Sequence[HeadTargets]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(torch.tensor(item.input_ids, dtype=torch.int32).numpy().tobytes())
        digest.update(item.ahead_PJ.tobytes())
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def check(saved: Mapping[str, Any], now: Mapping[str, Any], recipe: TrainRecipe) -> None:
    """Compare what a checkpoint was written with (`saved`) with what there is now.

    Raises IncompatibleBaseError for another base, ConfigError for all else that changed. Says in a
    line what a checkpoint of an earlier version does not tell.
    """
    there = f"the checkpoint in {recipe.output_dir}"
    _check_base(saved["base"], now["base"], there)
    config = compare_origins(saved, {CONFIG: now[CONFIG]})
    if config.other:
        raise ConfigError(
            f"{there} was written with {config.in_words()}",
            hint="put the config back, or add --fresh to start over",
        )
    if compare_encodings(saved.get(ENCODING), now[ENCODING]) is Encodings.OTHER:
        raise ConfigError(
            f"{there} was written with another tokenizer or chat template",
            hint="load the base as it was, or add --fresh to start over",
        )
    if saved.get(TRAINED_IN) is None and _was_in_16_bits(recipe):
        raise ConfigError(
            f"{there} is of adapters in {recipe.base.dtype}; they are trained in float32 now",
            hint=GO_ON_AS_BEGUN,
        )
    for name, part in PARTS.items():
        if name in saved and saved[name] != now[name]:
            raise ConfigError(f"{part.changed} since {there} was written", hint=part.hint)
    if saved["processes"] != now["processes"]:
        raise ConfigError(
            f"{there} was written by {saved['processes']} processes; now there are "
            f"{now['processes']}",
            hint=f"use --nproc {saved['processes']}, or add --fresh to start over",
        )
    untold = [WORDS[name][1] for name in config.unknown]
    untold += [] if FILES in saved else ["its weights and random states"]
    untold += [p.name for name, p in PARTS.items() if name not in saved and now[name]]
    if untold:
        console.note(
            f"{there} is of an earlier version, which wrote down nothing of these, so that they "
            f"could not be compared: {', '.join(untold)}"
        )


def _check_base(saved: Any, now: Any, there: str) -> None:
    match = compare(saved, now)
    if match is Match.OLD:
        console.note(f"{there}: {OLD_NOTE}")
    elif match is not Match.SAME:
        raise IncompatibleBaseError(
            f"{there} belongs to a base with fingerprint {saved}, this one has {now}",
            hint="load the base it was started with, or add --fresh to start over",
        )


def _was_in_16_bits(recipe: TrainRecipe) -> bool:
    """Whether versions that did not write TRAINED_IN updated anything in 16 bits."""
    in_16_bits = recipe.base.dtype != "float32"
    return recipe.stage == "medusa2" and not recipe.trains_whole_base and in_16_bits
