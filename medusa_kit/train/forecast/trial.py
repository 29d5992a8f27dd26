"""A trial of a run on a few of its longest rows: what it takes and how fast it is.

It goes through what a run goes through (hidden states, an update, held-out scores), so that its
peak is the run's, but for what grows with text.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.data.chat import EncodedExample
from medusa_kit.heads import MedusaHeads
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train import quality
from medusa_kit.train.batching import Batch
from medusa_kit.train.data import head_targets
from medusa_kit.train.features.features import FeatureOptions, by_length, run_batches
from medusa_kit.train.features.rows import HeadTargets
from medusa_kit.train.forecast.machine import peak_bytes
from medusa_kit.train.needs import Speed
from medusa_kit.train.optimizer import make_optimizer
from medusa_kit.train.preparation import Run, feature_options, prepare_run
from medusa_kit.train.processes import distributed
from medusa_kit.train.run.average import MovingAverage
from medusa_kit.train.stages import Terms

FORWARDS = 2  # of the base, as large as the run's
SLOW = 20.0  # seconds that they may take; one tells as much, but for what is done once
PATIENCE = 5.0  # seconds after which a micro-batch is not timed a second time
ROW_TOKENS, PROMPT_TOKENS = 300, 108  # of the rows that are assumed where there are none yet


@dataclass(frozen=True)
class Trial:
    run: Run
    speed: Speed
    peak: float  # bytes
    loss: float
    tokens: int
    positions: int
    held_out: int  # positions kept of these


def invented_rows(base: BaseModel, recipe: TrainRecipe) -> list[HeadTargets]:
    """Random text of usual lengths, enough for a trial."""
    length = min(ROW_TOKENS, recipe.data.max_length, base.info.context_length)
    prompt = length * PROMPT_TOKENS // ROW_TOKENS
    mask = [i >= prompt for i in range(length)]
    wanted = recipe.train.micro_batch_positions * recipe.train.accumulation
    count = 8 + wanted // (length - prompt) + 2 * recipe.train.feature_batch_tokens // length
    numbers = np.random.default_rng(0).integers(0, base.info.vocab_size, (count, length))
    return [
        head_targets(EncodedExample(ids, mask, row), recipe.heads.num_heads)
        for row, ids in enumerate(numbers.tolist())
    ]


def try_out(
    base: BaseModel,
    training: Sequence[HeadTargets],
    held_out: Sequence[HeadTargets],
    recipe: TrainRecipe,
    heads: MedusaHeads,
) -> Trial:
    """Raises what a run raises before its first update."""
    train = recipe.train
    few = _first(training, _forwards(base, training, recipe) * train.feature_batch_tokens,
                 train.micro_batch_positions * train.accumulation)  # fmt: skip
    judged = _first(held_out, train.feature_batch_tokens, 1)
    if recipe.stage == "medusa2":
        quality.read(base, judged, feature_options(recipe, base))
    began = time.monotonic()
    run = prepare_run(base, few, judged, _in_memory(recipe), heads)
    prepared = time.monotonic() - began
    read = sum(len(item.input_ids) for item in [*few, *judged])
    if prepared < PATIENCE and recipe.stage == "medusa1":  # without what is done once
        began, options = time.monotonic(), feature_options(recipe, base)
        for _ in run_batches(base, few, options):
            pass
        prepared, read = time.monotonic() - began, sum(len(item.input_ids) for item in few)
    loss, position = _update(run, recipe)
    _score(run)
    return Trial(
        run, Speed(prepared / max(1, read), position), peak_bytes(base.device), loss,
        sum(len(item.input_ids) for item in few), sum(len(item.positions_P) for item in few),
        sum(len(item.positions_P) for item in run.held_out),
    )  # fmt: skip


def _forwards(base: BaseModel, training: Sequence[HeadTargets], recipe: TrainRecipe) -> int:
    """How many forwards of the run's size are tried; one where they are slow, which is said."""
    if recipe.stage != "medusa1":
        return FORWARDS
    row, options = by_length(training)[-1], feature_options(recipe, base)
    seconds = _seconds_to_read(base, row, options)
    if seconds < PATIENCE:  # without what is done once
        seconds = _seconds_to_read(base, row, options)
    a_forward = seconds * recipe.train.feature_batch_tokens / len(row.input_ids)
    if FORWARDS * a_forward <= SLOW:
        return FORWARDS
    console.note(
        f"trying out a forward of {recipe.train.feature_batch_tokens:,} tokens and an update: "
        f"about {a_forward / 60:.1f} min"
    )
    return 1


def _seconds_to_read(base: BaseModel, row: HeadTargets, options: FeatureOptions) -> float:
    began = time.monotonic()
    for _ in run_batches(base, [row], options):
        pass
    return time.monotonic() - began


def _first(items: Sequence[HeadTargets], tokens: int, positions: int) -> list[HeadTargets]:
    """The longest, until there are as many tokens and positions."""
    found: list[HeadTargets] = []
    for item in by_length(items):
        found.append(item)
        tokens, positions = tokens - len(item.input_ids), positions - len(item.positions_P)
        if tokens <= 0 and positions <= 0 and len(found) >= FORWARDS:
            break
    return found


def _in_memory(recipe: TrainRecipe) -> TrainRecipe:
    """The recipe with features in memory, since a cache on disk would be written to."""
    if recipe.train.features != "disk":
        return recipe
    train = recipe.train.model_copy(update={"features": "memory", "cache_dir": None})
    return recipe.model_copy(update={"train": train})


def _update(run: Run, recipe: TrainRecipe) -> tuple[float, float]:
    """(loss of the first micro-batch, seconds a trained position takes)."""
    module = run.module
    average = MovingAverage(module, recipe.train.average)
    optimizer, _ = make_optimizer(module, recipe, fused=not recipe.deepspeed.enabled)
    update = next(iter(run.feed.epoch(0)))
    terms, batch = module.terms(update.ahead_PJ), update.batches[0]
    loss, seconds = _backward(run, batch, terms)
    if seconds < PATIENCE:  # the first time code is compiled and memory fetched
        optimizer.zero_grad(set_to_none=True)
        seconds = _backward(run, batch, terms)[1]
    began = time.monotonic()
    optimizer.step()
    average.add(0)
    stepped = time.monotonic() - began
    optimizer.zero_grad(set_to_none=True)
    return loss, (seconds + stepped / recipe.train.accumulation) / max(1, batch.num_positions)


def _backward(run: Run, batch: Batch, terms: Terms) -> tuple[float, float]:
    began = time.monotonic()
    loss = run.module(batch, terms).loss
    loss.backward()
    return loss.item(), time.monotonic() - began


def _score(run: Run) -> None:
    assert distributed.world() == 1
    run.scorer(None)()
