"""Combined and auto on a made-up text and clock: what is merged and verified, which are asked.

Shapes: B batch, N nodes with root.
"""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.states import begun, state_from

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.mixed.asking import AFFORDED, Asking
from medusa_kit.drafters.mixed.auto import AutoDrafter
from medusa_kit.drafters.mixed.combined import CombinedDrafter
from medusa_kit.drafters.mixed.experience import FIRST_REST, Experience
from medusa_kit.drafters.mixed.shares import Share
from medusa_kit.drafters.mixed.step import best_size
from medusa_kit.drafters.trie import Trie, TrieDrafter, draft_of
from medusa_kit.infer.draft import Draft, State, StepResult
from medusa_kit.infer.node_choice.choice import choose_nodes
from medusa_kit.infer.node_choice.cost import StepCost

CPU = torch.device("cpu")
EMPTY = torch.empty(0)


class Stub(TrieDrafter):
    """Copies the next tokens of the true text, each right with `skill`; asking takes `seconds`."""

    def __init__(self, name: str, text: Sequence[int], skill: float, clock: "Clock", seconds=0.0):
        super().__init__(CPU)
        self._name, self.text, self.skill = name, text, skill
        self.clock, self.seconds, self.draw = clock, seconds, random.Random(7)
        self.asked = 0

    @property
    def name(self) -> str:
        return self._name

    def guess(self, state: State) -> list[Trie]:
        self.clock.now += self.seconds
        self.asked += 1
        tries = []
        for tokens, root in zip(state.tokens, state.roots_B, strict=True):
            trie, node = Trie(root), 0
            for depth, token in enumerate(self.text[len(tokens) + 1 :][:8]):
                token = token if self.draw.random() < self.skill else 10_000 + depth
                node = trie.add(node, token, 0.5, (self._name, 8, depth))
            tries.append(trie)
        return tries


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(drafter, text: Sequence[int], clock: Clock, slope: float) -> tuple[int, list[int]]:
    """Decode `text` as a loop would, a step costing 1 + slope * (N - 1). (steps, sizes)."""
    state, sizes = begun(drafter, state_from([[text[0]]], [text[1]])), []
    while len(state.tokens[0]) + 1 < len(text) - 10:
        draft = drafter.propose(state)
        tokens, parents = draft.tokens_BN[0].tolist(), draft.topologies[0].parents
        sizes.append(len(tokens))
        clock.now += 1 + slope * (len(tokens) - 1)
        path, at = [], len(state.tokens[0])
        while (
            following := next(
                (
                    n
                    for n, p in enumerate(parents)
                    if p == (path[-1] if path else 0) and tokens[n] == text[at + 1 + len(path)]
                ),
                None,
            )
        ) is not None:
            path.append(following)
        kept = [tokens[0], *(tokens[n] for n in path)]
        root = text[at + len(kept)]
        (request,) = state.requests
        request.text, request.root = [*request.text, *kept], root
        drafter.observe(StepResult(draft, [path], [root], EMPTY, EMPTY, requests=state.requests))
        state = State([request])
    return len(sizes), sizes


def auto(free, costly, clock: Clock) -> AutoDrafter:
    hopes = [0.0] + [0.5] * len(costly)
    experience = Experience(AcceptanceEstimate(), StepCost(0.1), hopes)
    return AutoDrafter(free, costly, experience, CPU, 16, clock=clock)


class Beside:
    """A drafter in a batch with `num_others` more rows, of which each takes one node."""

    def __init__(self, drafter: AutoDrafter, num_others: int, slope: float = 0.1) -> None:
        self.drafter, self.num_others = drafter, num_others
        self.cost = StepCost(measured={1: 1.0, 32: 1.0 + 31 * slope})
        self.begin, self.observe = drafter.begin, drafter.observe

    def propose(self, state: State) -> Draft:
        offer = self.drafter.offer(state, self.cost, self.num_others)
        counts = choose_nodes([offer], self.num_others, self.cost).counts[0]
        return self.drafter.take(counts)


def text_of(length: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(1000) for _ in range(length)]


def test_drafting_stops_where_guesses_are_always_wrong() -> None:
    clock, text = Clock(), text_of(800)
    wrong = [Stub("suffix", text, 0.0, clock), Stub("medusa", text, 0.0, clock, seconds=0.2)]
    drafter = auto(wrong[:1], wrong[1:], clock)
    steps, _ = run(drafter, text, clock, slope=0.1)
    assert steps < clock.now < 1.02 * steps  # the first tries included
    assert drafter.shares["none"].steps > 0.9 * steps


def calibrated(share: float, text, clock: Clock, skill: float) -> tuple[AutoDrafter, Stub]:
    """A new auto whose heads' tree was calibrated: each of its nodes was right so often."""
    heads = Stub("medusa", text, skill, clock, seconds=0.2)
    experience = Experience(AcceptanceEstimate(), StepCost(0.1), [0.0, 0.5], {1: [share] * 2})
    return AutoDrafter([], [heads], experience, CPU, 16, clock=clock), heads


def test_heads_whose_calibration_says_that_they_do_not_pay_are_not_tried_at_first() -> None:
    clock, text = Clock(), text_of(160)
    drafter, heads = calibrated(0.02, text, clock, skill=0.0)
    steps, _ = run(drafter, text, clock, slope=0.1)
    assert steps < clock.now < 1.02 * steps  # two tries of four steps at most
    assert heads.asked <= 8


def test_heads_whose_calibration_says_that_they_pay_are_asked_from_the_second_step_on() -> None:
    clock, text = Clock(), text_of(160)
    drafter, heads = calibrated(0.9, text, clock, skill=0.9)
    steps, _ = run(drafter, text, clock, slope=0.1)
    assert heads.asked >= steps - 2
    assert clock.now < 0.6 * len(text)


def test_the_first_call_of_heads_which_warms_up_is_not_counted() -> None:
    clock, text = Clock(), text_of(160)
    drafter, heads = calibrated(0.6, text, clock, skill=0.8)
    first, guess = 20.0, heads.guess

    def slow_at_first(state: State) -> list[Trie]:
        nonlocal first
        clock.now, first = clock.now + first, 0.0
        return guess(state)

    heads.guess = slow_at_first  # type: ignore[method-assign]
    steps, _ = run(drafter, text, clock, slope=0.1)
    assert heads.asked >= 0.8 * steps


def test_sources_rest_where_asking_takes_longer_than_it_brings() -> None:
    """Some guesses are worth verifying, but fewer than would pay for the asking."""
    clock, text = Clock(), text_of(800)
    source = Stub("suffix", text, 0.75, clock, seconds=0.5)
    beside = Beside(auto([source], [], clock), num_others=15, slope=0.01)
    steps, sizes = run(beside, text, clock, slope=0.01)
    assert source.asked < 0.2 * steps
    assert sum(size > 1 for size in sizes) > 0.5 * source.asked


def test_sources_are_asked_at_every_step_where_that_pays() -> None:
    clock, text = Clock(), text_of(800)
    source = Stub("suffix", text, 0.9, clock, seconds=0.01)
    steps, _ = run(Beside(auto([source], [], clock), num_others=1), text, clock, slope=0.1)
    assert source.asked > 0.95 * steps
    assert steps < 0.5 * len(text)


def test_the_next_request_rests_as_long_as_the_last_one_did() -> None:
    clock, text = Clock(), text_of(300)
    first = Stub("suffix", text, 0.0, clock, seconds=0.3)
    drafter = auto([first], [], clock)
    run(Beside(drafter, num_others=15), text, clock, slope=0.1)
    again = Stub("suffix", text, 0.0, clock, seconds=0.3)
    following = AutoDrafter([again], [], drafter.experience, CPU, 16, clock=clock)
    steps, _ = run(Beside(following, num_others=15), text, clock, slope=0.1)
    assert again.asked <= first.asked
    assert again.asked < 0.2 * steps


def test_nobody_rests_while_heads_pay() -> None:
    """All asking together takes more than it brings, by a free source that is slow and never right,
    but heads alone pay for theirs."""
    clock, text = Clock(), text_of(600)
    slow = Stub("suffix", text, 0.0, clock, seconds=0.5)
    heads = Stub("medusa", text, 0.7, clock, seconds=0.1)
    steps, _ = run(Beside(auto([slow], [heads], clock), num_others=1), text, clock, slope=0.1)
    assert slow.asked > 0.95 * steps
    assert heads.asked > 0.8 * steps


def test_one_good_step_after_a_rest_ends_it() -> None:
    asking = Asking()
    rests = [asking.record(-0.4, False) for _ in range(8)]
    assert rests == sorted(rests)
    assert rests[-1] > 4
    assert asking.record(4.0, True) == 0
    assert asking.record(0.1, True) == 0


def test_nobody_rests_where_asking_in_vain_takes_next_to_nothing() -> None:
    asking = Asking()
    assert {asking.record(-0.9 * AFFORDED, False) for _ in range(200)} == {0}


def experience_of(hope: float) -> Experience:
    return Experience(AcceptanceEstimate(), StepCost(0.1), [0.0, hope])


DEAR = StepCost(measured={1: 0.1, 32: 0.1 + 31 * 0.03})  # 32 rows: a guess pays from 0.93 on
CHEAP = StepCost(measured={1: 1.0, 32: 1.1})


def test_the_first_rest_is_long_beside_so_many_rows_that_hardly_a_guess_pays() -> None:
    experience = experience_of(0.5)
    assert experience.asking(32, DEAR).record(-0.1, False) == FIRST_REST
    assert experience.asking(1, CHEAP).record(-0.1, False) == 0


@pytest.mark.parametrize(("cost", "most"), [(DEAR, 2), (CHEAP, 200)], ids=["dear", "cheap"])
def test_heads_are_hoped_for_as_far_as_their_guesses_can_pay(cost: StepCost, most: int) -> None:
    """They bring nothing here and take a fiftieth of a step."""
    chooser = experience_of(0.5).chooser(32, cost)
    asked = 0
    while asked < most and (choice := chooser.choose(1.0))[1]:
        chooser.record(*choice, -0.02)
        asked += 1
    assert asked < most
    assert (asked > 20) == (cost is CHEAP)


def test_sure_guesses_are_verified_at_length_and_heads_are_not_asked_for() -> None:
    clock, text = Clock(), text_of(2000)
    sure = Stub("suffix", text, 0.98, clock)
    heads = Stub("medusa", text, 0.6, clock, seconds=0.3)
    drafter = auto([sure], [heads], clock)
    steps, sizes = run(drafter, text, clock, slope=0.05)
    assert steps < len(text) / 4
    assert sum(sizes) / steps > 6
    asked = sum(s.steps for name, s in drafter.shares.items() if "medusa" in name)
    assert asked < 0.2 * steps


def test_notes_count_steps_in_words() -> None:
    drafter = auto([], [], Clock())
    drafter.shares["none"] = Share(1, 1)
    assert drafter.notes == []  # where nothing was ever guessed there is nothing to tell
    drafter.shares |= {"suffix": Share(4, 10), "medusa": Share(3, 6), "recycling": Share(2, 4),
                       "medusa + suffix": Share(1, 4)}  # fmt: skip
    said = "tokens a step: 2.50 with suffix (4 steps), 2.00 with medusa (3 steps), 2.00 with "
    assert drafter.notes == [said + "recycling (2 steps), 2.50 otherwise (2 steps)"]


def test_heads_are_asked_for_where_they_pay() -> None:
    clock, text = Clock(), text_of(1500)
    heads = Stub("medusa", text, 0.6, clock, seconds=0.1)
    drafter = auto([Stub("suffix", text, 0.02, clock)], [heads], clock)
    run(drafter, text, clock, slope=0.05)
    alone = Clock()
    single = CombinedDrafter(
        [Stub("medusa", text, 0.6, alone, seconds=0.1)], 4, AcceptanceEstimate(), CPU
    )
    run(single, text, alone, slope=0.05)
    assert clock.now < 1.03 * alone.now
    assert any("with medusa (" in note for note in drafter.notes)


@given(
    st.lists(st.floats(0.01, 0.95), min_size=1, max_size=12), st.floats(0.0, 0.5),
    st.integers(2, 8),
)  # fmt: skip
def test_the_size_taken_has_the_most_tokens_a_second(
    chances: list[float], slope: float, max_nodes: int
) -> None:
    trie, draw = Trie(0), random.Random(1)
    for token, chance in enumerate(chances, start=1):
        trie.add(draw.randrange(trie.num_nodes), token, chance)
    cost = StepCost(slope)
    size, promised = best_size([trie.by_chance()], cost, max_nodes)
    paths = sorted((chance for _, chance in trie.by_chance()), reverse=True)
    rates = [sum(paths[:n]) / cost.seconds(n) for n in range(1, min(max_nodes, len(paths)) + 1)]
    assert promised / cost.seconds(size) == pytest.approx(max(rates))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.floats(0.05, 1)), max_size=30))
def test_tries_keep_parents_before_children_and_merge_the_same_paths(
    adds: list[tuple[int, int, float]],
) -> None:
    whole, halves = Trie(9), [Trie(9), Trie(9)]
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
    small = both.best(5)
    assert small.num_nodes == min(5, both.num_nodes)
    assert all(parent < node for node, parent in enumerate(small.parents))


def _paths(trie: Trie) -> set[tuple[int, ...]]:
    found = [()]
    for node in range(1, trie.num_nodes):
        found.append((*found[trie.parents[node]], trie.tokens[node]))
    return set(found)


def test_a_long_match_outranks_likelier_guesses_in_a_combined_tree() -> None:
    class Fixed(TrieDrafter):
        def __init__(self, name: str, tokens: list[int], chance: float, match: int) -> None:
            super().__init__(CPU)
            self.own, self.tokens, self.chance, self.match = name, tokens, chance, match

        @property
        def name(self) -> str:
            return self.own

        def guess(self, state: State) -> list[Trie]:
            trie = Trie(state.roots_B[0])
            trie.add_chain(self.tokens, self.chance, (self.own, self.match))
            return [trie]

    heads = Fixed("medusa", [1, 2, 3], 0.9, 0)
    for match, first in ((4, [5, 6, 7]), (3, [1, 2, 3])):
        sources = [heads, Fixed("suffix", [5, 6, 7], 0.3, match)]
        drafter = CombinedDrafter(sources, 4, AcceptanceEstimate(), CPU)
        draft = drafter.propose(state_from([[0]], [8], EMPTY))
        assert draft.tokens_BN.tolist() == [[8, *first]]


def test_rows_of_different_size_are_filled_with_unused_nodes() -> None:
    small, large = Trie(1), Trie(2)
    large.add_chain([3, 4], 0.5)
    draft = draft_of([small, large], CPU)
    assert draft.tokens_BN.tolist() == [[1, 1, 1], [2, 3, 4]]
    assert draft.topologies[0].parents == (-1, -2, -2)
    assert [one.depths_N.tolist() for one in draft.topologies] == [[0, 0, 0], [0, 1, 2]]
