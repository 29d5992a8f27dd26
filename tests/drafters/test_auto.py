"""The drafting policy on a made-up text and clock: what is asked, and how much of it is verified.

Shapes: B batch, N nodes with root.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.small_engines import build_engine
from support.states import begun, state_from
from support.steps import result_of
from support.tiny_models import tiny_base

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.mixed.auto import AutoDrafter, PolicyStats
from medusa_kit.drafters.mixed.shares import SourceUsage
from medusa_kit.drafters.mixed.sources import together, usual_sources
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.infer.decode.drafter import State
from medusa_kit.infer.decode.node_choice.choice import choose_nodes
from medusa_kit.infer.decode.node_choice.cost import StepCost
from medusa_kit.infer.decode.timing import StepTiming
from medusa_kit.infer.forest import Forest
from medusa_kit.tree.draft_tree import DraftTree

CPU = torch.device("cpu")
COMPUTING = ("medusa", "draft-model")


class Stub(TreeDrafter):
    """Copies the next tokens of the true text, each right with `skill`; asking takes `seconds`."""

    def __init__(
        self, name: str, text: Sequence[int], skill: float, clock: "Clock", seconds: float = 0.0
    ) -> None:
        super().__init__(CPU)
        self._name, self.text, self.skill = name, text, skill
        self.clock, self.seconds, self.draw = clock, seconds, random.Random(7)
        self.runs_model, self.asked, self.chance = name in COMPUTING, 0, 0.5
        self.calibrated: list[float] | None = None

    @property
    def name(self) -> str:
        return self._name

    def expected(self, acceptance: AcceptanceEstimate) -> Sequence[float] | None:
        return self.calibrated

    def guess(self, state: State) -> list[DraftTree]:
        self.clock.now += self.seconds
        self.asked += 1
        trees = []
        for tokens, root in zip(state.tokens, state.roots_B, strict=True):
            tree, node = DraftTree(root), 0
            for depth, token in enumerate(self.text[len(tokens) + 1 :][:8]):
                token = token if self.draw.random() < self.skill else 10_000 + depth
                node = tree.add(node, token, self.chance, (self._name, 8, depth))
            trees.append(tree)
        return trees


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Alone:
    """A drafter as a batch uses it, beside `num_others` requests of which each takes one node. Each
    node but the first takes `slope` of a step."""

    def __init__(
        self, drafter: AutoDrafter, clock: Clock, num_others: int = 0, slope: float = 0.1
    ) -> None:
        self.drafter, self.clock, self.num_others = drafter, clock, num_others
        self.cost = StepCost(measured={1: 1.0, 32: 1.0 + 31 * slope})
        self.sizes: list[int] = []
        self.displaced = 0.0  # seconds by which the newest drafting makes the forward longer

    def step(self, state: State, text: Sequence[int]) -> State:
        """One step of the loop; everything that takes time moves the clock."""
        start = self.clock.now
        found = self.drafter.candidates(state, self.cost, self.num_others)
        draft = found.select(choose_nodes(found.chances, self.num_others, self.cost).counts)
        (tokens,), parents = draft.token_lists(), draft.shapes[0].parents
        self.sizes.append(len(tokens))
        forward = self.cost.seconds(self.num_others + len(tokens)) + self.displaced
        nodes, rows = self.num_others + len(tokens), self.num_others + 1
        timing = StepTiming(self.clock.now - start, forward, 0.0, 0.0, nodes, rows)
        self.clock.now, self.displaced = self.clock.now + forward, 0.0
        path, at = list[int](), len(state.tokens[0])
        while (
            following := self._child(tokens, parents, path, text[at + 1 + len(path)])
        ) is not None:
            path.append(following)
        kept = [tokens[0], *(tokens[n] for n in path)]
        root, (request,) = text[at + len(kept)], state.requests
        self.drafter.observe(result_of(draft, [path], [root], state.requests, timing=timing))
        request.text, request.root = [*request.text, *kept], root
        return State([request])

    @staticmethod
    def _child(
        tokens: Sequence[int], parents: Sequence[int], path: Sequence[int], token: int
    ) -> int | None:
        last = path[-1] if path else 0
        found = (n for n, up in enumerate(parents) if up == last and tokens[n] == token)
        return next(found, None)

    def decode(self, text: Sequence[int]) -> int:
        """All of the text; its steps."""
        state = begun(self.drafter, state_from([[text[0]]], [text[1]]))
        while len(state.tokens[0]) + 1 < len(text) - 10:
            state = self.step(state, text)
        return len(self.sizes)


def auto(sources: Sequence[Stub], clock: Clock) -> AutoDrafter:
    return AutoDrafter("auto", sources, PolicyStats(AcceptanceEstimate()), 16, CPU)


def text_of(length: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("others", [0, 15])
def test_drafting_stops_where_guesses_are_always_wrong(others: int) -> None:
    clock, text = Clock(), text_of(1500)
    wrong = [Stub("suffix", text, 0.0, clock, 0.05), Stub("medusa", text, 0.0, clock, 0.2)]
    drafter = auto(wrong, clock)
    for lost in (0.05, 0.02):  # in the first text all of it has to be learned
        start, loop = clock.now, Alone(drafter, clock, others)
        steps = loop.decode(text)
        plain = steps * loop.cost.seconds(1 + others)
        assert plain < clock.now - start < (1 + lost) * plain
        assert sum(size == 1 for size in loop.sizes) > 0.9 * steps


def test_heads_whose_calibration_says_that_they_lose_are_hardly_tried_at_first() -> None:
    clock, text = Clock(), text_of(160)
    heads = Stub("medusa", text, 0.0, clock, seconds=0.2)
    heads.calibrated, heads.chance = [0.02] * 2, 0.02
    loop = Alone(auto([heads], clock), clock)
    steps = loop.decode(text)
    assert clock.now < 1.02 * steps
    assert heads.asked <= 16


def test_heads_whose_calibration_says_that_they_gain_are_asked_from_the_start() -> None:
    clock, text = Clock(), text_of(300)
    heads = Stub("medusa", text, 0.9, clock, seconds=0.2)
    heads.calibrated = [0.9] * 2
    loop = Alone(auto([heads], clock), clock)
    steps = loop.decode(text)
    assert heads.asked >= 0.9 * steps
    assert clock.now < 0.6 * len(text)


def test_a_short_answer_has_heads_from_its_first_step_where_they_are_known_to_gain() -> None:
    """Also beside text that promises nothing, however the clock jumps."""
    clock, text = Clock(), text_of(42)
    heads = Stub("medusa", text, 0.8, clock, seconds=0.1)
    heads.calibrated, heads.chance = [0.6, 0.4], 0.6
    loop = Alone(auto([Stub("suffix", text, 0.0, clock), heads], clock), clock)
    steps = loop.decode(text)
    assert loop.sizes[0] > 1
    assert heads.asked == steps


@pytest.mark.parametrize("length", [42, 74, 266])
@pytest.mark.parametrize("is_foreseen", [True, False])
def test_trying_heads_that_are_known_to_lose_costs_an_answer_two_per_cent_at_most(
    length: int, is_foreseen: bool
) -> None:
    clock, text = Clock(), text_of(length)
    heads = Stub("medusa", text, 0.0, clock, seconds=0.2)
    heads.calibrated, heads.chance, heads.is_foreseen = [0.05], 0.05, is_foreseen
    steps = Alone(auto([heads], clock), clock).decode(text)
    assert clock.now <= 1.02 * steps


def test_heads_that_turn_out_to_be_right_less_often_than_calibrated_are_left_out() -> None:
    """What was seen of their draft tokens counts at once, in whatever the text promises."""
    clock, text = Clock(), text_of(266)
    heads = Stub("medusa", text, 0.05, clock, seconds=0.1)
    heads.calibrated, heads.chance, heads.is_foreseen = [0.4], 0.4, True
    key = ("medusa", 8, 0)

    def expected(acceptance: AcceptanceEstimate) -> list[float]:
        return [acceptance.chance(key, 0.4)]

    heads.expected = expected  # type: ignore[method-assign]
    steps = Alone(auto([heads], clock), clock).decode(text)
    assert heads.asked < 50
    assert clock.now < 1.05 * steps


def test_text_that_costs_next_to_nothing_is_read_at_every_step() -> None:
    clock, text = Clock(), text_of(600)  # long enough that what was hoped for is forgotten
    source = Stub("suffix", text, 0.0, clock, seconds=0.008)
    source.chance = 0.01
    steps = Alone(auto([source], clock), clock).decode(text)
    assert source.asked >= 0.9 * steps


def test_the_first_call_which_warms_up_is_not_counted() -> None:
    clock, text = Clock(), text_of(300)
    heads = Stub("medusa", text, 0.8, clock, seconds=0.2)
    first, guess = 20.0, heads.guess

    def slow_at_first(state: State) -> list[DraftTree]:
        nonlocal first
        clock.now, first = clock.now + first, 0.0
        return guess(state)

    heads.guess = slow_at_first  # type: ignore[method-assign]
    steps = Alone(auto([heads], clock), clock).decode(text)
    assert heads.asked >= 0.8 * steps


def test_text_is_not_read_where_that_takes_longer_than_it_brings() -> None:
    """Some guesses are worth verifying, but fewer than would pay for the asking."""
    clock, text = Clock(), text_of(2000)
    source = Stub("suffix", text, 0.75, clock, seconds=0.5)
    loop = Alone(auto([source], clock), clock, num_others=15, slope=0.05)
    assert source.asked == 0
    assert loop.decode(text) > 3 * source.asked > 0


def test_sources_are_asked_at_nearly_every_step_where_that_gains() -> None:
    clock, text = Clock(), text_of(2000)
    source = Stub("suffix", text, 0.9, clock, seconds=0.01)
    steps = Alone(auto([source], clock), clock, num_others=1).decode(text)
    assert source.asked > 0.95 * steps
    assert steps < 0.5 * len(text)


def test_the_next_request_begins_with_what_the_last_one_has_learned() -> None:
    clock, text = Clock(), text_of(300)
    first = Stub("suffix", text, 0.0, clock, seconds=0.3)
    drafter = auto([first], clock)
    Alone(drafter, clock, num_others=15).decode(text)
    again = Stub("suffix", text, 0.0, clock, seconds=0.3)
    following = AutoDrafter("auto", [again], drafter.stats, 16, CPU)
    steps = Alone(following, clock, num_others=15).decode(text)
    assert again.asked <= max(first.asked, 8)
    assert again.asked < 0.1 * steps


def test_text_that_is_slow_and_never_right_is_left_out_while_heads_gain() -> None:
    clock, text = Clock(), text_of(1500)
    slow = Stub("suffix", text, 0.0, clock, seconds=0.5)
    heads = Stub("medusa", text, 0.7, clock, seconds=0.1)
    steps = Alone(auto([slow, heads], clock), clock, num_others=1).decode(text)
    assert slow.asked < 0.1 * steps
    assert heads.asked > 0.8 * steps


def test_sure_copies_are_verified_at_length_and_heads_are_not_asked() -> None:
    clock, text = Clock(), text_of(4000)
    sure = Stub("suffix", text, 0.98, clock)
    heads = Stub("medusa", text, 0.6, clock, seconds=0.3)
    loop = Alone(auto([sure, heads], clock), clock, slope=0.05)
    steps = loop.decode(text)
    assert steps < len(text) / 4
    assert sum(loop.sizes) / steps > 6
    assert heads.asked < 0.2 * steps


def test_heads_are_asked_where_they_gain() -> None:
    clock, text = Clock(), text_of(1500)
    heads = Stub("medusa", text, 0.6, clock, seconds=0.1)
    drafter = auto([Stub("suffix", text, 0.02, clock), heads], clock)
    Alone(drafter, clock, slope=0.05).decode(text)
    alone = Clock()
    Alone(auto([Stub("medusa", text, 0.6, alone, seconds=0.1)], alone), alone, slope=0.05).decode(
        text
    )
    assert clock.now < 1.03 * alone.now < 0.8 * len(text)
    assert any("with medusa (" in note for note in drafter.notes)


def test_of_two_that_compute_the_better_one_is_found() -> None:
    clock, text = Clock(), text_of(3000)
    poor = Stub("medusa", text, 0.3, clock, seconds=0.1)
    good = Stub("draft-model", text, 0.9, clock, seconds=0.3)
    steps = Alone(auto([poor, good], clock), clock).decode(text)
    assert good.asked > 0.85 * steps


def test_the_price_of_asking_is_that_of_whole_steps() -> None:
    """Here the heads themselves take next to nothing, but what they displace makes every step of
    the base model longer, more than they bring."""
    clock, text = Clock(), text_of(1500)
    heads = Stub("medusa", text, 0.5, clock)
    loop, guess = Alone(auto([heads], clock), clock, slope=0.3), heads.guess

    def displacing(state: State) -> list[DraftTree]:
        loop.displaced = 0.9
        return guess(state)

    heads.guess = displacing  # type: ignore[method-assign]
    steps = loop.decode(text)
    assert heads.asked < 0.1 * steps
    assert clock.now < 1.08 * steps


def test_what_two_steps_draft_is_kept_apart_until_each_is_observed() -> None:
    text, other = text_of(40), text_of(80)[40:]
    clock = Clock()
    drafter = auto([Stub("suffix", [*text, *other], 1.0, clock)], clock)
    cost, states = StepCost(measured={1: 1.0, 32: 1.1}), list[State]()
    for tokens in (text, other):
        states.append(begun(drafter, state_from([tokens[:1]], [tokens[1]])))
    found = [drafter.candidates(state, cost, 0) for state in states]
    drafts = [one.select([count]) for one, count in zip(found, (2, 0), strict=True)]
    timing = StepTiming(0.0, 1.0, 0.0, 0.0, 3, 1)
    for state, draft, path in reversed(list(zip(states, drafts, ([1, 2], []), strict=True))):
        drafter.observe(result_of(draft, [path], [0], state.requests, timing=timing))
    assert [state.requests[0].credits for state in states] == [["suffix", "suffix"], []]
    assert [state.requests[0].drafted_by for state in states] == ["suffix", "none"]
    assert drafter.shares == {"suffix": SourceUsage(1, 3), "none": SourceUsage(1, 1)}


def test_without_a_batch_that_chooses_all_sources_fill_the_tree() -> None:
    clock, text = Clock(), text_of(40)
    sources = [Stub("suffix", text, 1.0, clock), Stub("medusa", text, 0.0, clock)]
    drafter = AutoDrafter("auto", sources, PolicyStats(AcceptanceEstimate()), 6, CPU)
    draft = drafter.propose(state_from([text[:1]], [text[1]]))
    assert [source.asked for source in sources] == [1, 1]
    assert draft.counts == [6]
    assert {text[2], 10_000} <= set(draft.tokens_N.tolist())


def test_notes_count_steps_in_words() -> None:
    drafter = auto([], Clock())
    drafter.shares["none"] = SourceUsage(1, 1)
    assert drafter.notes == []  # where nothing was ever guessed there is nothing to tell
    drafter.shares |= {"suffix": SourceUsage(4, 10), "medusa": SourceUsage(3, 6),
                       "recycling": SourceUsage(2, 4),
                       "medusa + suffix": SourceUsage(1, 4)}  # fmt: skip
    said = "tokens a step: 2.50 with suffix (4 steps), 2.00 with medusa (3 steps), 2.00 with "
    more = "recycling (2 steps), 1.00 without draft tokens (1 step), "
    assert drafter.notes == [said + more + "4.00 with medusa + suffix (1 step)"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.floats(0.05, 1)), max_size=30))
def test_tries_keep_parents_before_children_and_merge_the_same_paths(
    adds: list[tuple[int, int, float]],
) -> None:
    whole, halves = DraftTree(9), [DraftTree(9), DraftTree(9)]
    paths: set[tuple[int, ...]] = {()}
    for number, (where, token, chance) in enumerate(adds):
        known = sorted(paths)
        path = (*known[where % len(known)], token)
        paths.add(path)
        whole.add_chain(path, chance)
        halves[number % 2].add_chain(path, chance)
    both = halves[0]
    both.merge(halves[1])
    assert _paths(both) == _paths(whole) == paths
    order = both.by_chance()
    assert all(first >= second for (_, first), (_, second) in pairwise(order))
    small = both.kept([node for node, _ in order[:5]])
    assert small.num_nodes == min(5, both.num_nodes)
    assert all(parent < node for node, parent in enumerate(small.parents))


def _paths(tree: DraftTree) -> set[tuple[int, ...]]:
    found = [()]
    for node in range(1, tree.num_nodes):
        found.append((*found[tree.parents[node]], tree.tokens[node]))
    return set(found)


def test_rows_of_different_size_lie_one_after_another() -> None:
    small, large = DraftTree(1), DraftTree(2)
    large.add_chain([3, 4], 0.5)
    draft = Forest.of_drafts([small, large], CPU)
    assert draft.token_lists() == [[1], [2, 3, 4]]
    assert [shape.parents for shape in draft.shapes] == [(-1,), (-1, 0, 1)]
    assert draft.depths_N.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("second", [0, 3])
def test_guesses_of_two_sources_are_those_of_both(first: int, second: int) -> None:
    """Also where one of them, or neither, has any."""

    def trees() -> tuple[DraftTree, DraftTree]:
        one, other = DraftTree(1), DraftTree(1)
        one.add_chain([2, 3][:first], 0.5, "one")
        other.add_chain([2, 4, 5][:second], 0.7, "other")
        return one, other

    expected = DraftTree(1)
    for tree in trees():
        expected.merge(tree)
    (found,) = together(*([tree] for tree in trees()))
    assert found.by_chance() == expected.by_chance()
    for tree in (found, found.kept([node for node, _ in found.by_chance()])):
        assert _paths(tree) == _paths(expected)
    for part in ("tokens", "parents", "chances", "keys"):
        assert getattr(found, part) == getattr(expected, part)


def test_recycling_is_left_out_beside_heads() -> None:
    def names(heads: object) -> list[str]:
        refused: object = None
        context = SimpleNamespace(heads=heads, heads_refused=refused, draft_model=None)
        context.base = SimpleNamespace(info=SimpleNamespace(name="tiny"), config=SimpleNamespace())
        return usual_sources(cast(DraftContext, context), None)[0]

    assert names(None) == ["suffix", "recycling"]
    assert names(object()) == ["suffix", "medusa"]


def test_a_source_with_one_option_of_its_own_keeps_the_size_of_the_others() -> None:
    engine = build_engine(tiny_base("llama"))
    given = {"max_nodes": 12, "options": {"suffix": {"max_match": 5}}}
    drafter = engine.drafter_for("auto", given)
    assert isinstance(drafter, AutoDrafter)
    assert {one.name: one.num_nodes for one in drafter.sources}["suffix"] == 12
