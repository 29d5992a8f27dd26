"""`--dry-run`: what a run would train on, and the memory, disk and time it needs. Writes nothing.

Shapes: P positions, R columns of a reduced projection.
"""

from collections.abc import Callable, Sequence

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel
from medusa_kit.data.mix import check_sources
from medusa_kit.data.without_template import tell_template
from medusa_kit.errors import DataError
from medusa_kit.heads import MedusaHeads
from medusa_kit.settings.recipe import TrainRecipe, resolved
from medusa_kit.train import trainer
from medusa_kit.train.cpu_products import by_onednn
from medusa_kit.train.data import prepare, split
from medusa_kit.train.engine import Stage
from medusa_kit.train.features.rows import HeadTargets
from medusa_kit.train.forecast.described import has_weights
from medusa_kit.train.forecast.from_config import columns, from_config, rows_assumed
from medusa_kit.train.forecast.trial import Trial, invented_rows, try_out
from medusa_kit.train.needs import SIZES, Forecast, Text, size, weights_of
from medusa_kit.train.optimizer import moments
from medusa_kit.train.preparation import (
    feature_options,
    new_heads,
    trained_rows,
    untrained_heads,
)
from medusa_kit.train.processes import distributed

SHOWN_TOKENS = 120
# What DeepSpeed itself takes, imported and with a process group (0.19, on a CPU).
DEEPSPEED_BYTES = 25e6


def dry_run(
    recipe: TrainRecipe,
    self_check: Callable[[BaseModel], object] | None = None,
    load_frozen: Callable[..., BaseModel] = load_base_model,
) -> str:
    """A report in plain text. Raises what `train` would raise before its first update.

    Where base and text are there, a few rows and an update are tried out, to measure time and
    memory. Without text that is done on invented rows, and where only the base's config is there
    all follows from its sizes. `self_check`, `load_frozen`: as for `train`.
    """
    recipe = resolved(recipe)
    device = trainer.own_device(recipe.base.device)
    trainer.check_recipe(recipe, device)
    missing = _no_text(recipe)
    if not has_weights(recipe.base.model, recipe.base.revision):
        return "\n".join(from_config(recipe, device, missing))
    base = trainer.load_base(recipe, device, load_frozen)
    if self_check is not None:
        self_check(base)
    tell_template(base.tokenizer, base.info.name)
    with by_onednn(device):
        return "\n".join(_tried(base, recipe, missing))


def _no_text(recipe: TrainRecipe) -> str | None:
    """The message about text that is not there yet, or None."""
    try:
        check_sources(recipe.data)
    except DataError as error:
        return f"no text yet ({error.message})"
    return None


def _tried(base: BaseModel, recipe: TrainRecipe, missing: str | None) -> list[str]:
    if missing is None:
        prepared = prepare(trainer.load_examples(base, recipe), recipe.heads.num_heads)
    else:
        prepared = invented_rows(base, recipe)
    training, held_out = split(prepared, recipe.data.eval_fraction, recipe.seed)
    if missing is None:
        heads = new_heads(base, training, recipe)
    else:
        heads = untrained_heads(base, recipe.heads, columns(recipe, base))
    rows = trained_rows(training, recipe)
    trial = try_out(base, training, held_out, recipe, heads)
    forecast, text = _forecast(trial, base, recipe, heads), _text(recipe, rows, held_out)
    lines = _sizes(trial.run.module, recipe, rows, missing)
    lines += _needs(forecast, text, trial, base, missing)
    if missing is None:
        lines += ["first row (trained tokens between « »):", _shown(base, rows[0])]
    return lines


def _text(
    recipe: TrainRecipe, rows: Sequence[HeadTargets], held_out: Sequence[HeadTargets]
) -> Text:
    trained, kept_out = (sum(len(item.positions_P) for item in part) for part in (rows, held_out))
    return Text(trained, sum(len(item.input_ids) for item in rows), kept_out)


def _forecast(trial: Trial, base: BaseModel, recipe: TrainRecipe, heads: MedusaHeads) -> Forecast:
    module = trial.run.module
    of_heads = set(map(id, heads.parameters()))
    moving = [p for p in module.parameters() if p.requires_grad and id(p) not in of_heads]
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    kept = moments(module.heads, trained, recipe)
    weights = weights_of(recipe, heads, moving, base.info.num_parameters, kept)
    options = feature_options(recipe, base)
    forecast = Forecast(
        recipe, weights, trial.speed, trial.peak, base.info.hidden_size, base.dtype.itemsize,
        options,
    )  # fmt: skip
    tried = Text(trial.positions, trial.tokens, trial.held_out)
    forecast.peak += _deepspeed_bytes(recipe, weights.trained) - forecast.tried(tried)
    return forecast


def _deepspeed_bytes(recipe: TrainRecipe, trained: int) -> float:
    """Bytes that DeepSpeed takes beside plain torch: its code, a flat copy of gradients and, where
    a whole base trains in 16 bits, float32 copies of weights and moments."""
    if not recipe.deepspeed.enabled:
        return 0.0
    low = recipe.trains_whole_base and recipe.base.dtype != "float32"
    return DEEPSPEED_BYTES + trained * (12.0 if low else 4.0)


def _sizes(
    module: Stage, recipe: TrainRecipe, training: Sequence[HeadTargets], missing: str | None
) -> list[str]:
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    positions = sum(len(item.positions_P) for item in training)
    tokens = sum(len(item.input_ids) for item in training)
    update = recipe.train.micro_batch_positions * recipe.train.accumulation * distributed.world()
    lines = [
        f"stage {recipe.stage}: {trained:,} trained parameters, of them "
        f"{sum(p.numel() for p in module.heads.parameters()):,} in the heads"
    ]
    if missing is not None:
        return [*lines, f"{missing}; {rows_assumed(recipe)}"]
    return [
        *lines,
        f"{len(training):,} training rows, {tokens:,} tokens, {positions:,} training tokens "
        f"({positions / tokens:.0%})",
        f"{update:,} of them an update, about {max(1, round(positions / update)):,} updates an "
        f"epoch, {recipe.train.epochs} epochs",
    ]


def _needs(
    forecast: Forecast, text: Text, trial: Trial, base: BaseModel, missing: str | None
) -> list[str]:
    """Lines with the memory, disk and time that a run needs, extrapolated from the trial."""
    if missing is not None:
        return [forecast.written(text.scaled(SIZES[0])), *forecast.table(text)]
    recipe, weights = forecast.recipe, forecast.weights
    columns = trial.run.module.heads.num_columns
    columns = columns if forecast.stored else max(columns, base.info.vocab_size)
    kept = f" of {text.positions:,} training tokens" if forecast.stored else ""
    return [
        f"loss of the first micro-batch {trial.loss:.3f}",
        f"memory, about: model {size(base.num_bytes)}, trained weights with the optimiser's state "
        f"{size(weights.state_bytes)}, hidden states {size(forecast.features(text))}{kept}, a "
        f"chunk of logits {size(3 * recipe.train.chunk_positions * columns * 4)}; peak of the "
        f"process {size(forecast.memory(text))}"
        + (f", of it {size(forecast.features(text))} mapped from disk" if forecast.on_disk else ""),
        forecast.written(text),
        f"time on this machine, about: hidden states {forecast.reading(text) / 60:.1f} min, "
        f"updates {forecast.updating(text) / 60:.1f} min",
        "with so many training tokens of such text:",
        *forecast.table(text),
    ]


def _shown(base: BaseModel, item: HeadTargets) -> str:
    """The beginning of a row, with the trained tokens marked."""
    trained = {int(position) + 1 for position in item.positions_P}
    shown, inside = [], False
    for position, token in enumerate(item.input_ids[:SHOWN_TOKENS]):
        if (position in trained) != inside:
            shown.append("«" if not inside else "»")
            inside = not inside
        shown.append(base.tokenizer.decode([token]) if base.tokenizer else f" {token}")
    return (
        "".join(shown)
        + ("»" if inside else "")
        + (" …" if len(item.input_ids) > SHOWN_TOKENS else "")
    )
