"""Heads that are asked while steps with them pay, and verified as far as they are sure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from support.samples import pairs
from support.small_engines import endless_base, engine_with_heads, random_heads, random_prompt
from support.states import state_from

from medusa_kit.drafters import draft_with
from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.heads.confident import ConfidentDrafter
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.source import HeadsSource
from medusa_kit.drafters.heads.worth import (
    BETWEEN,
    FIRST_PLAIN,
    PLAIN,
    RUN,
    HeadsWorth,
    Worth,
)
from medusa_kit.engine.engine import Engine
from medusa_kit.heads.guesser import Least
from medusa_kit.infer.node_choice.cost import StepCost
from medusa_kit.infer.node_choice.measured import MeasuredSteps
from medusa_kit.infer.request import make_request
from medusa_kit.infer.scheduler import Scheduler
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.dynamic import DynamicTree

VOCAB, TOKENS, SCALES = 16, 120, (1.0, 1.0, 1.0)
FREE = {1: 1.0, 2: 1.0001, 64: 1.001}
KINDS = ["medusa", "hydra", "recurrent"]


@dataclass
class Timed:
    """A clock by which steps take as long as is said, and what the batch was offered and took."""

    plain: float = 1.0
    with_heads: float = 1.0
    now: float = 0.0
    taken: list[int] = field(default_factory=list)  # guesses of each step
    asked: list[bool] = field(default_factory=list)

    def drafter(self, engine: Engine, record: HeadsWorth) -> ConfidentDrafter:
        inner = draft_with(engine.heads, DynamicTree(8, SCALES, 6, 3))
        assert isinstance(inner, DynamicDrafter)
        drafter = ConfidentDrafter(inner, record, lambda: self.now)
        take = drafter.take

        def watched(counts: Sequence[int]):
            asked = bool(drafter._step.tries)
            self.now += self.with_heads if asked else self.plain
            self.taken.append(sum(counts))
            self.asked.append(asked)
            return take(counts)

        drafter.take = watched  # type: ignore[method-assign]
        return drafter


@pytest.fixture(scope="module", params=KINDS)
def engine(request) -> Engine:
    return engine_with_heads(endless_base(VOCAB), kind=request.param)


def decoded(engine: Engine, drafter: ConfidentDrafter, rows: int, costs: dict[int, float],
            sampling: SamplingParams | None = None) -> list[list[int]]:  # fmt: skip
    cost = StepCost(measured=costs)
    cost.record = lambda *_: None  # type: ignore[method-assign]
    params, steps = sampling or SamplingParams(), MeasuredSteps(engine.verifier)
    steps._cost = cost
    made = [make_request(engine.verifier, random_prompt(5 + seed, seed, VOCAB), params, TOKENS)
            for seed in range(rows)]  # fmt: skip
    for _ in Scheduler(engine.verifier, steps=steps).run(made, drafter):
        pass
    return [row.token_ids for row in made]


def plainly(engine: Engine, rows: int, sampling: SamplingParams | None = None) -> list[list[int]]:
    prompts = [random_prompt(5 + seed, seed, VOCAB) for seed in range(rows)]
    options = {} if sampling is None else {"temperature": sampling.temperature,
                                           "seed": sampling.seed}  # fmt: skip
    results = engine.generate(prompts, max_new_tokens=TOKENS, drafter="none", **options)
    return [result.token_ids for result in results]


@pytest.mark.parametrize(("rows", "temperature"), pairs([1, 3], [0.0, 0.9]))
def test_the_text_is_that_of_plain_decoding(engine: Engine, rows: int, temperature: float) -> None:
    sampling = SamplingParams(temperature, seed=4)
    expected = plainly(engine, rows, sampling)
    for costs in (FREE, {1: 1.0, 2: 1.3, 64: 20.0}, {1: 1.0, 2: 2.5, 64: 100.0}):
        watch = Timed()
        drafter = watch.drafter(engine, HeadsWorth())
        assert decoded(engine, drafter, rows, costs, sampling) == expected
        assert watch.asked[:FIRST_PLAIN] == [False] * FIRST_PLAIN
        assert any(watch.asked)
    assert "steps plain" in drafter.describe()


def test_heads_that_cost_nothing_are_asked_at_every_step_but_for_the_timed_ones(
    engine: Engine,
) -> None:
    watch = Timed(plain=1.0, with_heads=1.0)
    drafter = watch.drafter(engine, HeadsWorth())
    decoded(engine, drafter, 1, FREE)
    assert watch.asked == [False] * FIRST_PLAIN + [True] * (len(watch.asked) - FIRST_PLAIN)
    assert any(watch.taken)


def test_heads_that_take_longer_than_they_bring_rest(engine: Engine) -> None:
    watch, record = Timed(plain=1.0, with_heads=4.0), HeadsWorth()
    decoded(engine, watch.drafter(engine, record), 1, FREE)
    later = watch.asked[FIRST_PLAIN:]
    assert 1 <= sum(later) < 0.3 * len(later)
    again = Timed(plain=1.0, with_heads=4.0)
    decoded(engine, again.drafter(engine, record), 1, FREE)  # what was measured is remembered
    assert not all(again.asked)
    assert sum(again.asked) < 0.2 * len(again.asked)


def test_plain_steps_are_timed_again_now_and_then(engine: Engine) -> None:
    """Also in several short answers."""
    watch, record = Timed(), HeadsWorth()
    while len(watch.asked) < FIRST_PLAIN + BETWEEN + PLAIN + 1:
        decoded(engine, watch.drafter(engine, record), 1, FREE)
    first = FIRST_PLAIN + BETWEEN
    assert all(watch.asked[FIRST_PLAIN:first])
    assert watch.asked[first : first + PLAIN + 1] == [False] * PLAIN + [True]


def test_where_guesses_are_dear_only_sure_ones_are_verified(engine: Engine) -> None:
    counts = {}
    for name, marginal in (("cheap", 0.01), ("dear", 0.6)):
        watch = Timed()
        costs = {1: 1.0, 2: 1.0 + marginal, 64: 1.0 + 63 * marginal}
        decoded(engine, watch.drafter(engine, HeadsWorth()), 1, costs)
        counts[name] = sum(watch.taken) / len(watch.taken)
    assert counts["dear"] < 0.5 * counts["cheap"]


def test_the_whole_tree_is_proposed_where_nothing_is_chosen(engine: Engine) -> None:
    drafter = Timed().drafter(engine, HeadsWorth())
    state = state_from([[1], [2]], [5, 9], torch.randn(2, engine.base.info.hidden_size))
    whole = drafter.inner.propose(state)
    assert torch.equal(drafter.propose(state).tokens_BN, whole.tokens_BN)


@pytest.mark.parametrize("kind", KINDS)
def test_chances_are_those_that_the_heads_give(kind: str) -> None:
    heads = random_heads(endless_base(VOCAB), kind=kind)
    inner = draft_with(heads, DynamicTree(12, SCALES, 6, 3))
    assert isinstance(inner, DynamicDrafter)
    state = state_from([[1], [2]], [5, 9], 3 * torch.randn(2, heads.config.hidden_size))
    grown, source = inner.grow(state.hidden_BD, state.roots_B), HeadsSource(inner)
    for row, trie in enumerate(source.guess(state)):
        assert trie.tokens == grown.tokens_BN[row].tolist()
        order = trie.by_chance()
        for node, chance in order[1:]:
            assert chance == pytest.approx(math.exp(grown.scores_BN[row, node]), rel=1e-4)
    source.leave_out_below(0.2, AcceptanceEstimate())
    few = inner.grow(state.hidden_BD, state.roots_B, Least(math.log(0.2), math.log(0.7)))
    for row, trie in enumerate(source.guess(state)):
        assert trie.num_nodes == sum(parent != -2 for parent in few.parents[row])


def test_a_probability_that_proves_wrong_is_corrected() -> None:
    heads = random_heads(endless_base(VOCAB), kind="recurrent")
    inner = draft_with(heads, DynamicTree(4, SCALES, 6, 3))
    state = state_from([[1]], [5], 3 * torch.randn(1, heads.config.hidden_size))
    (trie,) = HeadsSource(inner).guess(state)
    said, acceptance = trie.chances[1], AcceptanceEstimate()
    for _ in range(100):
        acceptance.record(trie.keys[1], True)
    assert acceptance.chance(trie.keys[1], said) > max(said, 0.9)


def test_engines_use_it_for_trees_that_are_grown(engine: Engine) -> None:
    engine.use_tree(DynamicTree(6, SCALES, 6, 3))
    prompts = [random_prompt(5, seed, VOCAB) for seed in range(2)]
    plain = engine.generate(prompts, max_new_tokens=TOKENS, drafter="none")
    found = engine.generate(prompts, max_new_tokens=TOKENS)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]


def test_after_a_rest_heads_get_a_run_and_its_first_step_does_not_count() -> None:
    worth = Worth(dear=False)
    worth.took_plain(1.0)
    rests, steps = [], 0
    while len(rests) < 5:
        rest = worth.took_with_heads(0.0, 1.3)
        steps += 1
        if rest:
            rests.append((steps, rest))
            steps = 0
    assert [rest for _, rest in rests] == [8, 16, 32, 64, 64]
    assert rests[0][0] == RUN
    assert all(1 < steps <= RUN for steps, _ in rests)
    assert worth.took_with_heads(0.0, 100.0) == 0  # the first of a run
    while worth.took_with_heads(1.0, 1.3):
        pass
    for _ in range(20):
        worth.took_with_heads(1.0, 1.3)
    assert not any(worth.took_with_heads(1.0, 1.3) for _ in range(100))


def test_where_guesses_hardly_pay_heads_are_only_looked_at() -> None:
    worth = Worth(dear=True)
    worth.took_plain(1.0)
    assert [worth.took_with_heads(0.1, 1.5) for _ in range(4)] == [0, 64, 0, 64]
