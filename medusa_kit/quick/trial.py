"""How fast this machine trains these heads: hidden states and a few updates, on held-out answers.

Nothing of it is kept. The heads have as many columns as those to come should have.

Shapes: R columns of a reduced projection.
"""

import itertools
import statistics
from collections.abc import Sequence

import torch

from medusa_kit.base.model import BaseModel
from medusa_kit.data.chat import encode_rows
from medusa_kit.data.readers import AnswerRow
from medusa_kit.errors import DataError
from medusa_kit.heads import MedusaHeads
from medusa_kit.quick import settings
from medusa_kit.quick.plan import Rates
from medusa_kit.quick.state import Clock
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.cpu_products import by_onednn
from medusa_kit.train.data import prepare
from medusa_kit.train.engine import make_engine
from medusa_kit.train.features.rows import HeadTargets
from medusa_kit.train.preparation import Run, prepare_run, untrained_heads

ROWS = 24
WARM_UPS, UPDATES = 1, 7
BRIEF_ROWS, BRIEF_UPDATES = 3, 2  # about an update's tokens
FEW = 8  # positions of a row that no rate depends on
GROWTH = 0.6  # different tokens grow with this power of a text's length (Heaps' law)


def measure(
    base: BaseModel,
    answers: Sequence[AnswerRow],
    recipe: TrainRecipe,
    answer_rate: float,
    expected: float,
    clock: Clock,
    brief: bool = False,
) -> Rates:
    """`answer_rate`: tokens a second, measured before; `expected`: positions to come, about;
    `brief`: with fewer rows and updates, for a person who waits."""
    examples, _ = encode_rows(
        answers[: BRIEF_ROWS if brief else ROWS],
        base.tokenizer,
        settings.MAX_LENGTH,
        "skip",
        base.info.vocab_size,
    )
    items = prepare(examples, recipe.heads.num_heads)
    if not items:
        raise DataError(
            f"{base.info.name} gave {len(answers)} answers without any text to train on",
            hint="are these prompts for this model? `medusa-kit generate` shows an answer",
        )
    heads = _heads(base, items, recipe, expected)
    train = recipe.train.model_copy(update={"features": "memory", "cache_dir": None})
    recipe = recipe.model_copy(update={"train": train})
    tokens = sum(len(item.input_ids) for item in items)
    positions = sum(len(item.positions_P) for item in items)
    with by_onednn(base.device):
        began = clock()
        held_out = [_beginning(items[0])]  # which a run has to have
        run = prepare_run(base, items, held_out, recipe, heads)
        features = (tokens + len(held_out[0].input_ids)) / max(clock() - began, 1e-6)
        updates = _update_rate(run, recipe, base, clock, BRIEF_UPDATES if brief else UPDATES)
    length = sum(len(row.response_ids) for row in answers) / len(answers)
    trained = run.num_positions / positions
    return Rates(answer_rate, features, updates, tokens / positions, length, trained)


def _beginning(item: HeadTargets) -> HeadTargets:
    """A row up to its first few targets."""
    last = int(item.positions_P[:FEW][-1]) + 2
    return HeadTargets(item.input_ids[:last], item.positions_P[:FEW], item.ahead_PJ[:FEW])


def _update_rate(
    run: Run, recipe: TrainRecipe, base: BaseModel, clock: Clock, num_updates: int
) -> float:
    """Positions a second: the median of a few updates, since others may use the machine too."""
    engine = make_engine(run.module, recipe, base.device)
    epochs = itertools.chain.from_iterable(run.feed.epoch(seed) for seed in itertools.count())
    rates = []
    for update in itertools.islice(epochs, WARM_UPS + num_updates):
        began = clock()
        terms = run.module.terms(update.ahead_PJ)
        for batch in update.batches:
            engine.backward(engine.forward(batch, terms).loss)
        engine.update(recipe.train.learning_rate)
        if base.device.type == "cuda":
            torch.cuda.synchronize(base.device)
        rates.append(len(update.ahead_PJ) / max(clock() - began, 1e-6))
    engine.close()
    return statistics.median(rates[WARM_UPS:])


def _heads(
    base: BaseModel, items: Sequence[HeadTargets], recipe: TrainRecipe, expected: float
) -> MedusaHeads:
    options, ids_R = recipe.heads, None
    if options.reduced_size is not None:
        frequent = torch.cat([torch.from_numpy(item.ahead_PJ).flatten() for item in items])
        frequent = frequent[frequent >= 0].unique().long()
        others = torch.ones(base.info.vocab_size, dtype=torch.bool)
        others[frequent] = False
        positions = sum(len(item.positions_P) for item in items)
        columns = int(len(frequent) * max(1.0, expected / positions) ** GROWTH)
        ids_R = torch.cat([frequent, others.nonzero().flatten()])
        ids_R = ids_R[: min(columns, options.reduced_size)]
        ids_R = ids_R.sort().values
    return untrained_heads(base, options, ids_R)
