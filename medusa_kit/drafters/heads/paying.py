"""Heads whose static tree is verified where it pays, so that no step is slower than a plain one.

How often each node of the tree was right is counted; the batch takes as many of the likeliest as
pay beside its other rows (infer/node_choice/). Where none does, the heads do not run at all, and
now and then one row tries one guess, since text changes. The text is the same either way.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from medusa_kit.drafters.estimates import BELIEF, AcceptanceEstimate
from medusa_kit.drafters.heads.medusa import HeadsDrafter
from medusa_kit.drafters.heads.static_chances import path_chances
from medusa_kit.infer.draft import ROOT, Draft, Drafter, State, StepResult, padded_draft, root_draft
from medusa_kit.infer.node_choice.choice import Offer
from medusa_kit.infer.node_choice.cost import StepCost
from medusa_kit.locks import SharedLock

ORDERED = 8  # steps between two looks at how often nodes were right, which change slowly
# Share of the chance that a first guess must have, below which none is offered: further nodes may
# cost less than the first.
HOPELESS = 0.25
TRIAL = 32  # plain steps between two tries of guesses that do not pay
# Guesses for which calibration counts. It saw tens of thousands, and a node that a few misses have
# ruled out is not verified again.
CALIBRATED_BELIEF = 100.0
SMOOTHING = 0.1  # share of the newest call in what heads take
HEAVIER = 1.5  # the most that a head is believed to take, in times of the first one


@dataclass
class HeadsRecord:
    """What all requests of an engine have seen of one tree: how often each node was right, and how
    long naming the guesses of so many heads for so many rows took."""

    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)  # by rows and heads
    _lock: SharedLock = field(default_factory=SharedLock, repr=False, compare=False)

    def seconds(self, num_rows: int, num_heads: int = 1) -> float:
        """Of naming them; zero before the first time.

        More heads take as long at least as fewer. What is believed of them is bounded by the time
        of one: tries measure that one anew, while heads that seem too slow would never run again.
        """
        with self._lock:
            one = self._nearest(num_rows, 1)
            known = [self._nearest(num_rows, heads) for heads in range(1, num_heads + 1)]
        return min(max(known), HEAVIER * num_heads * one) if one else max(known)

    def _nearest(self, num_rows: int, num_heads: int) -> float:
        counts = [rows for rows, heads in self._seconds if heads == num_heads]
        near = [rows for rows in counts if rows <= num_rows] or counts
        return self._seconds[max(near), num_heads] if near else 0.0

    def took(self, num_rows: int, seconds: float, num_heads: int = 1) -> None:
        """The first time warms up and does not count; a slow one counts little, since it keeps the
        heads from being asked again."""
        size = num_rows, num_heads
        with self._lock:
            if size not in self._seconds:
                self._seconds[size] = 0.0
                return
            known = self._seconds[size] or seconds
            slower = (1 - SMOOTHING) * known + SMOOTHING * min(seconds, 2 * known)
            self._seconds[size] = min(seconds, slower)


class PayingDrafter(Drafter):
    """Offers the static tree of `inner`. `clock`: in seconds."""

    offers = True

    def __init__(
        self,
        inner: HeadsDrafter,
        record: HeadsRecord,
        calibrated: Sequence[float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`calibrated`: the share of steps that accepted each node below the root, where known."""
        self.inner, self.record, self._clock = inner, record, clock
        self.name, self.num_nodes = inner.name, inner.num_nodes
        self.steps = self.plain_steps = 0  # of each row
        self._state: State | None = None  # of the current step
        self._order: list[int] = []  # nodes, likeliest first
        self._chances: list[float] = []  # of these, in the same order
        self._offers = 0  # since they were put in order
        self._kept: list[list[int]] = []  # nodes of each row that are verified
        self._since_try = 0  # plain steps in a row
        self._parents, self._believed = inner.tree.parents, path_chances(inner.tree, calibrated)
        self._weight = BELIEF if calibrated is None else CALIBRATED_BELIEF

    def describe(self) -> str:
        if not self.plain_steps:
            return self.name
        return f"{self.name}, {self.plain_steps} of {self.steps} steps plain"

    def propose(self, state: State) -> Draft:
        """The whole tree for each row."""
        self._state, self._order, self._offers = state, list(range(1, self.num_nodes)), 0
        return self.take([self.num_nodes - 1] * len(state.roots_B))

    def offer(self, state: State, cost: StepCost, num_others: int) -> Offer:
        B = len(state.roots_B)
        self._state = state
        self._put_in_order()
        least = HOPELESS * cost.least_chance(num_others + B)
        count = max(sum(chance >= least for chance in self._chances), 1)
        likeliest = self._chances[:count]
        tries = self._since_try >= TRIAL and self.num_nodes > 1
        trial = self.steps % B if tries else None
        heads = self._heads_of_first(count)
        seconds = {number: self.record.seconds(B, number) for number in {1, *heads}}
        more = [seconds[number] - seconds[1] for number in heads]
        return Offer([likeliest] * B, seconds[1], trial, more)

    def _put_in_order(self) -> None:
        if self._offers % ORDERED == 0:
            chances = [1.0]
            for node in range(1, self.num_nodes):
                own = self.record.acceptance.chance(node, self._believed[node], self._weight)
                chances.append(min(own, chances[self._parents[node]]))
            self._order = sorted(range(1, self.num_nodes), key=lambda node: (-chances[node], node))
            self._chances = [chances[node] for node in self._order]
        self._offers += 1

    def take(self, counts: Sequence[int]) -> Draft:
        """Only as much of the tree is drafted as some row verifies."""
        state, device = self._state, self.inner.heads.base.device
        assert state is not None, "nothing was offered"
        rows = [row for row, count in enumerate(counts) if count]
        self.steps += len(counts)
        self.plain_steps += len(counts) - len(rows)
        self._kept = [[0] for _ in counts]
        if not rows:
            self._since_try += 1
            return root_draft(state.roots_B, device)
        self._since_try, start = 0, self._clock()
        most = max(counts)
        nodes = sorted(self._order[:most])
        whole = self.inner.propose_nodes(
            state if len(rows) == len(counts) else state.of_rows(rows), nodes
        )
        for row, topology in zip(rows, whole.topologies, strict=True):
            last = [0, *nodes][topology.num_used - 1]
            own = sorted(self._order[: counts[row]])
            self._kept[row] += [node for node in own if node <= last]
        self.record.took(len(rows), self._clock() - start, self._heads_of_first(most)[-1])
        if min(counts) == most:
            return whole
        return self._without_others(whole, rows, [0, *nodes])

    def _heads_of_first(self, count: int) -> list[int]:
        """How many heads run for the likeliest guess, the two likeliest, and so on."""
        depths = self.inner.tree.depths
        return list(accumulate((depths[node] for node in self._order[:count]), max))

    def _without_others(self, whole: Draft, rows: Sequence[int], nodes: Sequence[int]) -> Draft:
        """The draft of all rows with the nodes that each keeps. `rows`: those of `whole`, whose
        nodes are `nodes`."""
        assert self._state is not None
        tokens = [[root] for root in self._state.roots_B]
        parents = [[ROOT] for _ in tokens]
        place_in_whole = {node: place for place, node in enumerate(nodes)}
        for row, own, topology in zip(
            rows, whole.tokens_BN.tolist(), whole.topologies, strict=True
        ):
            kept = [place_in_whole[node] for node in self._kept[row]]
            place = {node: at for at, node in enumerate(kept)}
            tokens[row] = [own[node] for node in kept]
            parents[row] = [ROOT, *(place[topology.parents[node]] for node in kept[1:])]
        return padded_draft(tokens, parents, self.inner.heads.base.device)

    def observe(self, step: StepResult) -> None:
        for kept, path in zip(self._kept, step.paths, strict=True):
            for place, node in enumerate(kept[1:], start=1):
                self.record.acceptance.record(node, place in path)
