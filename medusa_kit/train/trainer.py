"""Medusa-1 training: the base frozen, the heads learning from its hidden states.

recipe -> base, encoded rows -> positions and targets -> features -> updates -> heads on disk.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from medusa_kit import console
from medusa_kit.base_model import DTYPES, BaseModel, load_base_model
from medusa_kit.config import TrainRecipe
from medusa_kit.data.chat import EncodedExample, encode_rows
from medusa_kit.data.readers import read_rows
from medusa_kit.errors import MedusaKitError
from medusa_kit.heads import MedusaHeads, save_heads
from medusa_kit.train.data import HeadTargets, coverage, most_frequent_ids, prepare, split
from medusa_kit.train.evaluate import HeadScores
from medusa_kit.train.loop import TrainingLoop
from medusa_kit.train.run_folder import RunFolder
from medusa_kit.version import __version__


@dataclass(frozen=True)
class TrainReport:
    """What a finished run came to."""

    heads_folder: Path
    num_updates: int
    num_positions: int  # training positions in one epoch
    seconds: float
    scores: HeadScores  # on held-out rows


def train(
    recipe: TrainRecipe, fresh: bool = False, prove: Callable[[BaseModel], object] | None = None
) -> TrainReport:
    """Train heads as `recipe` says, going on from its checkpoint where there is one.

    `fresh` removes an older run's checkpoint from output_dir first. `prove` is called with the base
    before any work and refuses it by raising (trees that cannot be verified on it).

    Raises ConfigError (recipe, output_dir in use), DataError (no usable rows), MedusaKitError (loss
    not finite, full disk).
    """
    RunFolder(recipe).open(fresh)
    base = load_base_model(
        recipe.base.model,
        dtype=recipe.base.dtype,
        device=recipe.base.device,
        revision=recipe.base.revision,
    )
    if prove is not None:
        prove(base)
    return train_heads(base, load_examples(base, recipe), recipe)


def load_examples(base: BaseModel, recipe: TrainRecipe) -> list[EncodedExample]:
    """All rows of the recipe's sources, encoded; what was skipped is said on stderr."""
    data = recipe.data
    rows = itertools.chain.from_iterable(read_rows(source) for source in data.sources)
    length = min(data.max_length, base.info.context_length)
    examples, report = encode_rows(
        itertools.islice(rows, data.limit), base.tokenizer, length, data.on_error
    )
    if report.skipped:
        row, reason = report.skipped[0]
        console.warn(f"{len(report.skipped)} rows skipped, the first is row {row}: {reason}")
    return examples


def train_heads(
    base: BaseModel, examples: Sequence[EncodedExample], recipe: TrainRecipe
) -> TrainReport:
    """`train` for a base and rows that are already in memory."""
    folder = RunFolder(recipe)
    folder.open()
    training, held_out = split(
        prepare(examples, recipe.heads.num_heads), recipe.data.eval_fraction, recipe.seed
    )
    digest = base.weights_digest()
    heads = _new_heads(base, training, recipe)
    loop = TrainingLoop(base, heads, training, held_out, recipe, folder)
    try:
        loop.collect()
        loop.resume()
        loop.updates()
        scores = loop.score()
    finally:
        loop.engine.close()
    if base.weights_digest() != digest:
        raise MedusaKitError(
            "training changed the base model's weights, which must stay as they are",
            hint="this is a bug in medusa-kit: please report it with the recipe",
        )
    save_dtype = recipe.heads.save_dtype
    save_heads(heads, folder.heads, DTYPES[save_dtype] if save_dtype else base.dtype)
    report = TrainReport(folder.heads, loop.step, loop.num_positions, loop.elapsed(), scores)
    folder.finish(_summary(report, recipe, base, digest))
    return report


def _new_heads(base: BaseModel, training: list[HeadTargets], recipe: TrainRecipe) -> MedusaHeads:
    """Untrained heads in float32 (float64 for a float64 base): small updates vanish in bfloat16."""
    options = recipe.heads
    ids_R = None
    if options.reduced_size is not None:
        ids_R = most_frequent_ids(training, options.reduced_size, base.stop_token_ids)
        share = coverage(training, ids_R)
        console.note(f"reduced projection: {len(ids_R):,} tokens, {share:.1%} of training targets")
    heads = MedusaHeads.for_base(
        base, options.num_heads, options.num_blocks, options.projection, ids_R, options.kind
    )
    return heads.double() if base.dtype == torch.float64 else heads.float()


def _summary(
    report: TrainReport, recipe: TrainRecipe, base: BaseModel, digest: str
) -> dict[str, Any]:
    return {
        "versions": {
            "medusa_kit": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "base": base.info.as_dict(),
        "base_weights_before_and_after": digest,
        "recipe": recipe.model_dump(),
        "num_updates": report.num_updates,
        "num_positions": report.num_positions,
        "seconds": round(report.seconds, 1),
        "held_out": report.scores.as_dict(),
    }
