"""Heads whose guesses are verified where they pay: the same text, and plain steps elsewhere."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.small_engines import BUSHY, endless_base, engine_with_heads, random_prompt
from support.states import state_from

from medusa_kit.drafters import draft_with
from medusa_kit.drafters.heads.paying import ORDERED, TRIAL, HeadsRecord, PayingDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.draft import Draft, State
from medusa_kit.infer.node_choice.cost import StepCost
from medusa_kit.infer.scheduler import Scheduler

TOKENS = 100
FREE = {1: 1.0, 2: 1.0001, 64: 1.001}
DEAR = {1: 1.0, 2: 2.5, 64: 100.0}


class Fixed:
    """In place of MeasuredSteps: these costs, whatever the clock says."""

    def __init__(self, measured: dict[int, float]) -> None:
        self.cost = StepCost(measured=measured)
        self.cost.record = lambda *_: None  # type: ignore[method-assign]


def costing(engine: Engine, measured: dict[int, float]) -> Engine:
    return replace(engine, scheduler=Scheduler(engine.verifier, steps=Fixed(measured)))


@pytest.fixture(scope="module", params=["medusa", "hydra"])
def engine(request) -> Engine:
    return engine_with_heads(endless_base(40), kind=request.param)


@pytest.mark.parametrize("rows", [1, 3])
def test_where_nodes_cost_nothing_all_that_are_ever_right_are_verified(
    engine: Engine, rows: int
) -> None:
    prompts = [random_prompt(5 + 3 * seed, seed, 40) for seed in range(rows)]
    plain = engine.generate(prompts, max_new_tokens=TOKENS, drafter="none")
    found = costing(engine, FREE).generate(prompts, max_new_tokens=TOKENS)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert all(one.stats.nodes_per_step > 0.4 * BUSHY.num_nodes for one in found)
    assert sum(one.stats.num_steps for one in found) < rows * (TOKENS - 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_where_nodes_are_dear_steps_are_plain_but_for_trials(engine: Engine, rows: int) -> None:
    prompts = [random_prompt(5 + 3 * seed, seed, 40) for seed in range(rows)]
    plain = engine.generate(prompts, max_new_tokens=TOKENS, drafter="none")
    found = costing(engine, DEAR).generate(prompts, max_new_tokens=TOKENS)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    extra = sum(one.stats.nodes_per_step * one.stats.num_steps - one.stats.num_steps
                for one in found)  # fmt: skip
    assert 1 <= round(extra) <= TOKENS / TRIAL + 2
    assert " steps plain" in found[0].stats.drafter


def test_the_statistics_say_what_was_chosen_and_why(engine: Engine) -> None:
    stats = costing(engine, DEAR).generate([5, 6, 7], max_new_tokens=TOKENS).stats
    (why,) = [note for note in stats.drafter_notes if note.startswith("nodes")]
    assert "worth its cost from a chance of" in why or "no draft token is worth" in why


def test_a_drafter_that_says_its_own_number_is_left_alone() -> None:
    engine = engine_with_heads(endless_base(40))
    engine = costing(engine, DEAR)
    options = {"num_tokens": 4}
    one = engine.generate([5, 6, 7, 5, 6, 7, 5, 6], max_new_tokens=40, drafter="prompt-lookup",
                          drafter_options=options)  # fmt: skip
    plain = engine.generate([5, 6, 7, 5, 6, 7, 5, 6], max_new_tokens=40, drafter="none")
    assert one.token_ids == plain.token_ids
    assert one.stats.nodes_per_step > 1


def test_a_first_call_that_warms_up_does_not_keep_heads_from_being_asked() -> None:
    record = HeadsRecord()
    for seconds in (5.0, 0.01, 0.01, 3.0):
        record.took(1, seconds)
    assert 0 < record.seconds(1) < 0.02


def test_deeper_guesses_take_longer_but_no_more_than_so_many_single_ones() -> None:
    record = HeadsRecord()
    for heads, seconds in ((1, 0.01), (2, 0.015), (3, 9.0), (4, 0.012)):
        record.took(1, 5.0, heads)
        record.took(1, seconds, heads)
    assert [round(record.seconds(1, heads), 4) for heads in (1, 2, 3, 4)] == [
        0.01, 0.015, 0.045, 0.06,
    ]  # fmt: skip
    assert record.seconds(5, 2) == 0.015
    assert HeadsRecord().seconds(3, 2) == 0


@pytest.mark.parametrize("count", [1, 3])
def test_only_what_is_verified_is_drafted(engine: Engine, count: int) -> None:
    """The heads below it do not run; the nodes are those of the whole tree."""
    assert engine.heads is not None
    inner = draft_with(engine.heads, engine.tree)
    generator = torch.Generator().manual_seed(0)
    hidden_BD = torch.randn(2, engine.base.info.hidden_size, generator=generator)
    state = state_from([[1], [2]], [5, 9], hidden_BD)
    drafter = PayingDrafter(inner, HeadsRecord())
    offer = drafter.offer(state, StepCost(measured=FREE), 0)
    assert len(offer.more) == inner.num_nodes - 1
    whole, asked = inner.propose(state), []
    propose_nodes = inner.propose_nodes

    def watched(state: State, nodes: Sequence[int]) -> Draft:
        asked.append(list(nodes))
        return propose_nodes(state, nodes)

    inner.propose_nodes = watched  # type: ignore[method-assign]
    draft = drafter.take([count, 1])
    assert [len(nodes) for nodes in asked] == [count]
    kept = [0, *asked[0]]
    for row, number in enumerate((count, 1)):
        nodes = kept[: number + 1] if number == count else [0, drafter._order[0]]
        assert draft.topologies[row].num_used == len(nodes)
        tokens = draft.tokens_BN[row, : len(nodes)].tolist()
        assert tokens == [int(whole.tokens_BN[row, node]) for node in nodes]


def test_a_few_misses_do_not_rule_out_what_calibration_has_seen(engine: Engine) -> None:
    """A guess that is not verified is not counted again."""
    assert engine.heads is not None
    inner, record = draft_with(engine.heads, engine.tree), HeadsRecord()
    state = state_from([[1]], [5], torch.zeros(1, engine.base.info.hidden_size))
    calibrated = [0.3] * (inner.num_nodes - 1)
    for _ in range(10):
        record.acceptance.record(2, False)
    ((*_, least),) = PayingDrafter(inner, record, calibrated).offer(state, StepCost(), 0).chances
    assert 0.25 < least < 0.3


def test_guesses_that_can_never_pay_are_not_offered(engine: Engine) -> None:
    """Until, some steps later, they are seen to be right."""
    assert engine.heads is not None
    inner = draft_with(engine.heads, BUSHY)
    shares = [0.8, 0.05, *[0.01] * (BUSHY.num_nodes - 3)]
    drafter = PayingDrafter(inner, HeadsRecord(), shares)
    state = state_from([[1]], [5], torch.randn(1, engine.base.info.hidden_size))
    cost = StepCost(measured={1: 1.0, 2: 1.4, 64: 9.0})

    def offered() -> list[float]:
        return list(drafter.offer(state, cost, 0).chances[0])

    assert offered() == pytest.approx([0.8])  # 0.05 is less than a quarter of 0.4
    for _ in range(100):
        drafter.record.acceptance.record(2, True)
    later = [len(offered()) for _ in range(ORDERED)]
    assert later[0] == 1
    assert later[-1] == 2
