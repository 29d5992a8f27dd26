"""What a run needs by a base's config alone: no weight is read, and no text."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from medusa_kit.base import adapters
from medusa_kit.base.model import BaseModel
from medusa_kit.base.placement import DTYPES
from medusa_kit.heads import MedusaHeads
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.features.features import FeatureOptions
from medusa_kit.train.forecast.described import DescribedBase
from medusa_kit.train.forecast.machine import peak_bytes, products_a_second
from medusa_kit.train.forecast.trial import PROMPT_TOKENS, ROW_TOKENS
from medusa_kit.train.needs import SIZES, Forecast, Speed, Text, weights_of
from medusa_kit.train.optimizer import moments, network_matrices
from medusa_kit.train.preparation import SOFT_TOP, untrained_heads
from medusa_kit.train.states import check_states

# Numbers that a layer's forward holds for a token, by its hidden and its MLP's size: inputs,
# queries, keys, values, output; what the MLP multiplies.
OF_HIDDEN, OF_MLP = 8, 3
NEWTON_SCHULZ = 5  # steps of Muon, torch's default
KEPT_LAYERS = 2.0  # of which so many are alive at once; where the base learns, all of them


def columns(recipe: TrainRecipe, base: BaseModel) -> torch.Tensor | None:
    """Token ids, as many as the recipe's heads keep of a vocabulary; None for all."""
    requested = recipe.heads.reduced_size
    return None if requested is None else torch.arange(min(requested, base.info.vocab_size))


def rows_assumed(recipe: TrainRecipe) -> str:
    """What is said of text that nobody has seen."""
    length = min(ROW_TOKENS, recipe.data.max_length)
    answer = length - length * PROMPT_TOKENS // ROW_TOKENS
    return f"rows of {length} tokens, {answer} of them answers, are assumed"


@dataclass(frozen=True)
class Described:
    """A run on a base of which only the config is there."""

    numbers: int  # weights of the base
    trained: int
    in_heads: int
    forecast: Forecast
    text: Text  # that is assumed, about a million positions


def described(
    recipe: TrainRecipe, products: Callable[[torch.dtype], float], process: float
) -> Described:
    """`products`: multiplications with addition that the device does a second, by their dtype;
    `process`: bytes that are taken before. Raises CheckpointError."""
    base = DescribedBase(recipe.base)
    check_states(base.config, recipe)
    numbers = base.info.num_parameters
    heads = untrained_heads(base, recipe.heads, columns(recipe, base))
    if recipe.stage == "medusa2" and not recipe.trains_whole_base:
        adapters.put_on(base.model, recipe.joint_options.lora)
    moving = [p for p in base.model.parameters() if p.requires_grad or recipe.trains_whole_base]
    trained = sum(p.numel() for p in (*heads.parameters(), *moving))
    weights = weights_of(recipe, heads, moving, numbers, moments(heads, trained, recipe))
    train = recipe.train
    soft = 0 if train.loss == "cross_entropy" or train.soft_top == "all" else train.soft_top
    options = FeatureOptions(
        soft_top=SOFT_TOP if soft is None else soft, runners_up=train.runners_up
    )
    itemsize = DTYPES[recipe.base.dtype].itemsize
    speed = _speed(recipe, base, heads, products)
    peak = process + numbers * itemsize + weights.state_bytes + _working(recipe, base)
    forecast = Forecast(recipe, weights, speed, peak, base.info.hidden_size, itemsize, options)
    in_heads = sum(p.numel() for p in heads.parameters())
    return Described(numbers, trained, in_heads, forecast, _text(recipe))


def from_config(recipe: TrainRecipe, device: torch.device, missing: str | None) -> list[str]:
    """The report. `missing`: what is said of the text. Raises CheckpointError."""
    run = described(recipe, lambda dtype: products_a_second(device, dtype), peak_bytes(device))
    forecast, text = run.forecast, run.text
    note = "text that is there is not read" if missing is None else missing
    return [
        f"stage {recipe.stage}: {run.trained:,} trained parameters, of them "
        f"{run.in_heads:,} in the heads",
        f"{recipe.base.model}: {run.numbers:,} parameters by its config; its weights are not on "
        "this machine, so time is estimated from products of this device, and memory from sizes",
        f"{note}; {rows_assumed(recipe)}",
        forecast.written(text.scaled(SIZES[0])),
        *forecast.table(text),
    ]


def _text(recipe: TrainRecipe) -> Text:
    length = min(ROW_TOKENS, recipe.data.max_length)
    answer = length - length * PROMPT_TOKENS // ROW_TOKENS
    positions = length if recipe.data.train_on == "all" else answer
    rows = 1_000_000 // positions
    held_out = round(rows * recipe.data.eval_fraction) * answer
    return Text(rows * positions, rows * length, held_out)


def _working(recipe: TrainRecipe, base: BaseModel) -> float:
    """Bytes of a forward of the base and of a chunk of logits."""
    config, size = base.config, DTYPES[recipe.base.dtype].itemsize
    mlp = getattr(config, "intermediate_size", None) or 4 * base.info.hidden_size
    layer = (OF_HIDDEN * base.info.hidden_size + OF_MLP * mlp) * size
    learns = recipe.stage == "medusa2" and not recipe.joint_options.gradient_checkpointing
    alive = base.info.num_layers if learns else KEPT_LAYERS
    tokens = recipe.train.micro_batch_positions if learns else recipe.train.feature_batch_tokens
    logits = 3 * recipe.train.chunk_positions * base.info.vocab_size * 4
    return float(tokens * layer * alive + logits)


def _speed(
    recipe: TrainRecipe, base: BaseModel, heads: MedusaHeads,
    products: Callable[[torch.dtype], float],
) -> Speed:  # fmt: skip
    """Products by the rate of large ones here: one for each weight and token of a forward, three
    where there is a backward. Recurrent heads go through their one network for each head."""
    rate, precise = (products(DTYPES[name]) for name in (recipe.base.dtype, recipe.train.precision))
    embedding = base.model.get_input_embeddings().weight.numel()
    forward = base.info.num_parameters - embedding
    size = base.info.hidden_size
    logits = heads.num_columns * size * heads.num_heads
    passes = heads.num_heads if recipe.heads.kind == "recurrent" else 1
    network = passes * sum(p.numel() for p in heads.parameters())
    each = 3 * (network + logits) / precise
    if recipe.train.optimizer == "muon":
        update = recipe.train.micro_batch_positions * recipe.train.accumulation
        each += _muon(heads) / products(torch.bfloat16) / update
    text = _text(recipe)
    read = text.tokens / text.positions
    if recipe.stage == "medusa2":
        each += 4 * read * forward / rate
    elif recipe.train.features == "live":
        each += read * forward / rate
    return Speed(forward / rate, each)


def _muon(heads: MedusaHeads) -> float:
    """Products of an update by Muon: for each step and matrix X three of X's smaller side."""
    total = 0.0
    for weight in network_matrices(heads):
        small, large = sorted(weight.shape)
        total += NEWTON_SCHULZ * (2 * small * small * large + small**3)
    return total
