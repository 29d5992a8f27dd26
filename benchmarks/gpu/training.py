"""Throughput and memory of a training recipe, by the real training code on random tokens.

Shapes: P positions, K heads.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.runner import Part
from benchmarks.gpu.steps import some_prompts
from benchmarks.gpu.workbench import Workbench
from medusa_kit.bench.gpu.shapes import Shape
from medusa_kit.data.chat import EncodedExample
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.batching import Update
from medusa_kit.train.data import prepare
from medusa_kit.train.engine import PlainEngine, TrainingEngine
from medusa_kit.train.preparation import prepare_run

ROWS, LENGTH, PROMPT = 48, 1024, 64
WARM_UPS = 2


def training(shape: Shape, bench: Workbench) -> dict[str, Any]:
    """Medusa-1 with the defaults of a recipe: features once, then updates of the heads."""
    base = bench.untouched(shape)
    recipe = _recipe(bench)
    length = bench.size(LENGTH, 16)
    rows = some_prompts(bench, shape, length, bench.size(ROWS, 6))
    written = [place >= length // (LENGTH // PROMPT) for place in range(length)]
    examples = [EncodedExample(ids, written, number) for number, ids in enumerate(rows)]
    items = prepare(examples, recipe.heads.num_heads)
    run, collecting = bench.clock.once(lambda: prepare_run(base, items[1:], items[:1], recipe))
    engine = PlainEngine(run.module, recipe, base.device)
    try:
        updates = list(run.feed.epoch(recipe.seed))
        _updates(engine, updates[:WARM_UPS], recipe)
        timed = updates[WARM_UPS:]
        _, seconds = bench.clock.once(lambda: _updates(engine, timed, recipe))
    finally:
        engine.close()
    positions = sum(len(update.ahead_PJ) for update in timed)
    return {
        "positions": positions,
        "positions_per_second": positions / seconds,
        "feature_tokens_per_second": len(rows) * length / collecting,
        "heads": recipe.heads.num_heads,
        "micro_batch_positions": recipe.train.micro_batch_positions,
        "loss": recipe.train.loss,
    }


def _updates(engine: TrainingEngine, updates: Sequence[Update], recipe: TrainRecipe) -> None:
    """Runs updates as the training loop does."""
    for update in updates:
        terms = engine.module.terms(update.ahead_PJ)
        for batch in update.batches:
            engine.backward(engine.forward(batch, terms).loss)
        engine.update(recipe.train.learning_rate)


def _recipe(bench: Workbench) -> TrainRecipe:
    settings: dict[str, Any] = {
        "output_dir": "unused",
        "base": {"model": "unused", "dtype": str(bench.dtype).removeprefix("torch.")},
        "data": {"sources": ["unused"]},
        "deepspeed": {"enabled": False},
    }
    if bench.small:
        settings["train"] = {"micro_batch_positions": 16, "chunk_positions": 8}
    return TrainRecipe.model_validate(settings)


def training_part(shape: Shape) -> Part:
    return Part(f"{shape.name}: training", "training", partial(training, shape), 20.0, shape.name)
