"""`--dry-run`: what a run would train on and how much memory and time it needs. Writes nothing.

Shapes: P positions, D hidden.
"""

import time
from collections.abc import Sequence

import torch

from medusa_kit.base.model import BaseModel
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train import distributed, trainer
from medusa_kit.train.cpu_products import by_onednn
from medusa_kit.train.data import HeadTargets, prepare, split
from medusa_kit.train.engine import Stage
from medusa_kit.train.features.features import by_length, counted
from medusa_kit.train.optimizer import check_optimizer, make_optimizer
from medusa_kit.train.preparation import (
    Run,
    check_earlier_heads,
    feature_options,
    prepare_run,
    trained_rows,
)

COPIES = 4  # weights, gradients, two moments (Muon: one)
SHOWN_TOKENS = 120


def dry_run(recipe: TrainRecipe) -> str:
    """A report in plain text. Raises what `train` would raise before its first update.

    One micro-batch is run, forward and backward, to measure time and memory.
    """
    device = trainer.own_device(recipe.base.device)
    check_optimizer(recipe, device)
    check_earlier_heads(recipe)
    base = trainer.load_base(recipe, device)
    examples = trainer.load_examples(base, recipe)
    training, held_out = split(
        prepare(examples, recipe.heads.num_heads), recipe.data.eval_fraction, recipe.seed
    )
    few = by_length(training)[: max(4, len(training) // 50)]
    began = time.monotonic()
    with by_onednn(device):
        run = prepare_run(base, few, held_out[:2], _in_memory(recipe))
        prepared = time.monotonic() - began
        rows = trained_rows(training, recipe)
        estimates = _estimates(run, base, recipe, rows, prepared)
    return "\n".join(
        [
            *_sizes(run.module, recipe, rows),
            *estimates,
            "first row (trained tokens between « »):",
            _shown(base, rows[0]),
        ]
    )


def _in_memory(recipe: TrainRecipe) -> TrainRecipe:
    """The recipe with features in memory, since a cache on disk would be written to."""
    if recipe.train.features != "disk":
        return recipe
    train = recipe.train.model_copy(update={"features": "memory", "cache_dir": None})
    return recipe.model_copy(update={"train": train})


def _sizes(module: Stage, recipe: TrainRecipe, training: Sequence[HeadTargets]) -> list[str]:
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    positions = sum(len(item.positions_P) for item in training)
    tokens = sum(len(item.input_ids) for item in training)
    update = recipe.train.micro_batch_positions * recipe.train.accumulation * distributed.world()
    return [
        f"stage {recipe.stage}: {trained:,} trained parameters, of them "
        f"{sum(p.numel() for p in module.heads.parameters()):,} in the heads",
        f"{len(training):,} training rows, {tokens:,} tokens, {positions:,} trained positions "
        f"({positions / tokens:.0%})",
        f"{update:,} positions an update, about {max(1, round(positions / update)):,} updates an "
        f"epoch, {recipe.train.epochs} epochs",
    ]


def _estimates(
    run: Run,
    base: BaseModel,
    recipe: TrainRecipe,
    training: Sequence[HeadTargets],
    prepared: float,
) -> list[str]:
    """Extrapolated from one micro-batch and the features of a few rows."""
    module, positions = run.module, sum(len(item.positions_P) for item in training)
    update = next(iter(run.feed.epoch(0)))
    terms = module.terms(update.ahead_PJ, 1.0)
    began = time.monotonic()
    loss = module(update.batches[0], terms).loss
    loss.backward()
    seconds = time.monotonic() - began
    seconds += _optimizer_seconds(module, recipe) / recipe.train.accumulation
    each = seconds / max(1, update.batches[0].num_positions)
    stored = recipe.stage == "medusa1" and (recipe.train.features or "memory") != "live"
    passes = prepared * positions / run.num_positions if stored else 0.0
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    whole = recipe.heads.prefix_layers > 0
    kept = sum(int(i.positions_P[-1]) + 1 for i in training) if whole else positions
    states = feature_options(recipe, base).states if stored else 0
    features = states * kept * base.info.hidden_size * base.dtype.itemsize
    copies = COPIES + (recipe.train.average is not None)
    columns = max(run.module.heads.num_columns, base.info.vocab_size if not stored else 0)
    logits = 3 * recipe.train.chunk_positions * columns * 4
    model = base.num_bytes
    return [
        f"loss of the first micro-batch {loss.item():.3f}",
        f"memory, about: model {_gb(model)}, trained weights with the optimiser's state "
        f"{_gb(copies * trained)}, hidden states {_gb(features)}"
        + (f" of {counted(kept, positions)}" if stored else "")
        + f", a chunk of logits {_gb(logits)}"
        + _gpu_peak(base.device),
        f"time on this machine, about: hidden states {passes / 60:.1f} min, updates "
        f"{each * positions * recipe.train.epochs / 60 / distributed.world():.1f} min",
    ]


def _optimizer_seconds(module: Stage, recipe: TrainRecipe) -> float:
    """Of one update by Muon; AdamW reads and writes the weights once, which is little."""
    if recipe.train.optimizer == "adamw":
        return 0.0
    optimizer, _ = make_optimizer(module, recipe)
    began = time.monotonic()
    optimizer.step()
    return time.monotonic() - began


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _gpu_peak(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f"; measured in this trial: {_gb(torch.cuda.max_memory_allocated(device))}"


def _shown(base: BaseModel, item: HeadTargets) -> str:
    """The beginning of a row, with the trained tokens marked."""
    trained = {int(position) + 1 for position in item.positions_P}
    shown, inside = [], False
    for place, token in enumerate(item.input_ids[:SHOWN_TOKENS]):
        if (place in trained) != inside:
            shown.append("«" if not inside else "»")
            inside = not inside
        shown.append(base.tokenizer.decode([token]) if base.tokenizer else f" {token}")
    return (
        "".join(shown)
        + ("»" if inside else "")
        + (" …" if len(item.input_ids) > SHOWN_TOKENS else "")
    )
