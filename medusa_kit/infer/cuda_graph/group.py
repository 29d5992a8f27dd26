"""Rows of a batch whose steps run whole on the device, in a step that is lent to them.

Keys and values of a prompt are copied from the batch's cache when a row joins, and those of its
answer back when it leaves. Rows that have left idle in their place, so that shapes and a captured
graph stay valid, until others take it. Once half of the places idle, the rows move to a smaller
step; where there are too few for those that join, to a larger one.

Shapes: B rows, D hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa_kit.errors import ConfigError
from medusa_kit.infer.cuda_graph.host_trees import HostTreeSpec, Tree
from medusa_kit.infer.cuda_graph.runner import GraphRunner, Loan
from medusa_kit.infer.cuda_graph.step import Outcome
from medusa_kit.infer.draft import Drafter, State, StepResult
from medusa_kit.infer.request import Emitted, Row
from medusa_kit.infer.tree_cache import TreeCache

NOTHING = torch.empty(0)  # in place of hidden states and logits, which stay on the device


class HostTreeDrafter(Drafter, Protocol):
    """A drafter that needs only what steps whose trees come from the host return."""

    host_trees: HostTreeSpec | None

    def use_host_trees(self, whether: bool) -> None:
        """Guess on the host from now on, where the heads' guesses come with the state, or not."""


@dataclass
class Joining:
    """A row whose prompt is in `place` of the batch's cache."""

    row: Row
    place: int
    state: State


class CapturedGroup:
    """Rows with one drafter in a step that drafts by itself. `cache`: the batch's."""

    def __init__(self, graphs: GraphRunner, drafter: Drafter, cache: TreeCache) -> None:
        self.drafter, self._graphs, self._cache = drafter, graphs, cache
        self._loan: Loan | None = None
        self.rows: list[Row] = []
        self._places: list[int] = []  # of the batch's cache
        self._spots: list[int] = []  # rows of the step's cache
        self._joining: list[Joining] = []

    def add(self, joining: Joining) -> None:
        """Let a row join with the next step."""
        self._joining.append(joining)

    @property
    def is_empty(self) -> bool:
        return not self.rows and not self._joining

    @property
    def all_rows(self) -> list[Row]:
        """With those that join with the next step."""
        return [*self.rows, *(one.row for one in self._joining)]

    def prepare(self) -> list[Joining]:
        """Find a step for the rows; returns those that there is none for, to be decoded without.
        Where it is too small for all, rows wait until some have left."""
        if self._joining and self._loan is None:
            self._loan = self._graphs.lend(self.drafter, [one.row for one in self._joining])
            if self._loan is None:
                turned_away, self._joining = self._joining, []
                return turned_away
            self._begin()
        elif self._joining and not self._fit(len(self._joining)):
            widened = self._lent.widen(self._spots, self.all_rows)
            self._spots = list(range(len(self.rows))) if widened else self._spots
        count = 0
        while count < len(self._joining) and self._fit(count + 1):
            count += 1
        if count:
            self._join(self._joining[:count])
            del self._joining[:count]
        elif self.rows and self._lent.narrow(self._spots, self.rows):
            self._spots = list(range(len(self.rows)))
        if not self.rows and self._joining:  # longer than the step's rows
            self.give_back()
            return self.prepare()
        return []

    def step(self) -> Emitted:
        """One step of all rows; what it emitted."""
        results = self._run()
        emitted: Emitted = []
        for row, outcome in zip(self.rows, results, strict=True):
            kept = row.take(outcome.emitted)
            row.count_step(len(kept), len(outcome.emitted) - 1, outcome.num_nodes)
            row.near_ties += outcome.near_ties if row.counts_near_ties else 0
            emitted.append((row, kept))
        return emitted

    def let_go(self) -> None:
        """Rows that have finished leave. What was computed of their answers goes to the batch's
        cache, where it may serve later prompts."""
        self._joining = [one for one in self._joining if one.row.finish_reason is None]
        alive = [index for index, row in enumerate(self.rows) if row.finish_reason is None]
        if len(alive) < len(self.rows):
            for index in set(range(len(self.rows))) - set(alive):
                row, place, spot = self.rows[index], self._places[index], self._spots[index]
                self._lent.step.rest(spot)
                self._cache.take_row(place, self._lent.step.cache, spot, self.length(row))
            self._keep(alive)
        if self.is_empty:
            self.give_back()

    def give_back(self) -> None:
        """The step serves others from now on."""
        if self._loan is not None:
            self._loan.give_back()
            self._loan = None

    @staticmethod
    def length(row: Row) -> int:
        """Tokens of a row that keys and values are there for: all but the root."""
        return len(row.prompt_ids) + len(row.token_ids) - 1

    @property
    def _lent(self) -> Loan:
        assert self._loan is not None, "a group without a step has no rows"
        return self._loan

    def _fit(self, count: int) -> bool:
        """Whether so many of the rows that join fit beside those that are there."""
        rows = [*self.rows, *(one.row for one in self._joining[:count])]
        return self._lent.fits(rows)

    def _join(self, joining: Sequence[Joining]) -> None:
        step = self._lent.step
        free = [spot for spot in range(step.batch_size) if spot not in self._spots]
        spots = free[: len(joining)]
        for one, spot in zip(joining, spots, strict=True):
            one.row.steps_run_by = self._graphs.steps_run_by
            one.row.attention = self._graphs.attention
            step.cache.take_row(spot, self._cache, one.place, len(one.row.prompt_ids))
        lengths = [len(one.row.prompt_ids) for one in joining]
        step.join(spots, lengths, max(one.row.rounding_tolerance for one in joining))
        self.rows += [one.row for one in joining]
        self._places += [one.place for one in joining]
        self._spots += spots
        roots = [one.state.roots_B[0] for one in joining]
        self._start(spots, roots, torch.cat([one.state.hidden_BD for one in joining]), joining)

    def _keep(self, alive: Sequence[int]) -> None:
        self.rows = [self.rows[index] for index in alive]
        self._places = [self._places[index] for index in alive]
        self._spots = [self._spots[index] for index in alive]

    def _begin(self) -> None:
        """A step has been lent."""

    def _start(
        self,
        spots: Sequence[int],
        roots: Sequence[int],
        hidden_BD: Tensor,
        joining: Sequence[Joining],
    ) -> None:
        self._lent.graph_step.draft(spots, roots, hidden_BD)

    def _run(self) -> list[Outcome]:
        results = self._lent.graph_step.run()
        return [results[spot] for spot in self._spots]


class HostTreeGroup(CapturedGroup):
    """The same where the trees come from the host: the drafter runs there, all else does not."""

    drafter: HostTreeDrafter
    _state: State | None = None

    def prepare(self) -> list[Joining]:
        turned_away = super().prepare()
        if turned_away:
            self.drafter.use_host_trees(False)
        return turned_away

    def _begin(self) -> None:
        self.drafter.use_host_trees(True)
        self._state = None

    def _start(
        self,
        spots: Sequence[int],
        roots: Sequence[int],
        hidden_BD: Tensor,
        joining: Sequence[Joining],
    ) -> None:
        heads, guesses = self._lent.host_tree_step.drafter.heads, None
        if heads is not None:  # their tree after the prompts
            roots_B = torch.tensor(roots, device=hidden_BD.device)
            guesses = heads.fill(hidden_BD, roots_B).tolist()
        tokens = [list(one.row.prompt_ids) for one in joining]
        state = State(tokens, list(roots), NOTHING, [one.row.chooser for one in joining], guesses)
        self.drafter.join(state)
        self._state = state if self._state is None else self._state.with_rows(state)

    def _keep(self, alive: Sequence[int]) -> None:
        super()._keep(alive)
        assert self._state is not None
        self._state = self._state.of_rows(alive) if alive else None
        self.drafter.select_rows(alive)

    def _run(self) -> list[Outcome]:
        state = self._state
        assert state is not None
        draft = self.drafter.propose(state)
        counts = [topology.num_used for topology in draft.topologies]
        trees = [
            Tree(tokens[:count], topology.used_parents)
            for tokens, topology, count in zip(
                draft.tokens_BN.tolist(), draft.topologies, counts, strict=True
            )
        ]
        by_spot = self._lent.host_tree_step.run(dict(zip(self._spots, trees, strict=True)))
        outcomes = [by_spot[spot] for spot in self._spots]
        paths = [_path(tree, one.emitted) for tree, one in zip(trees, outcomes, strict=True)]
        next_roots = [one.emitted[-1] for one in outcomes]
        self.drafter.observe(
            StepResult(draft, paths, next_roots, NOTHING, NOTHING, *_ranked(outcomes))
        )
        for row, tokens, root, one, count in zip(
            self.rows, state.tokens, state.roots_B, outcomes, counts, strict=True
        ):
            tokens += [root, *one.emitted[:-1]]
            row.num_padding += one.num_nodes - count
        guesses = None if state.guesses is None else [one.guesses for one in outcomes]
        self._state = State(state.tokens, next_roots, NOTHING, state.choosers, guesses)
        return outcomes


def captured_group(graphs: GraphRunner, drafter: Drafter, cache: TreeCache) -> CapturedGroup:
    """A group for rows that `graphs.may_take`."""
    if getattr(drafter, "host_trees", None) is not None:
        return HostTreeGroup(graphs, drafter, cache)
    return CapturedGroup(graphs, drafter, cache)


def check_alike(drafter: Drafter, row: Row, others: Mapping[Row, Drafter]) -> None:
    """Raises ConfigError for a row that cannot be decoded on the device beside rows of the same
    drafter that can be, where the drafter keeps account of its rows."""
    if getattr(drafter, "host_trees", None) is None:
        return
    argmax = row.chooser.takes_argmax
    if any(one is drafter and r.chooser.takes_argmax != argmax for r, one in others.items()):
        raise ConfigError(
            f"drafter {drafter.name} was given requests of which some take the likeliest token "
            "and some do not; its draft tokens are sent to steps on the device for the "
            "former alone",
            hint="build a drafter for each way of sampling",
        )


def _path(tree: Tree, emitted: Sequence[int]) -> list[int]:
    """The accepted nodes. `emitted`: their tokens, then the next root."""
    children = {
        (parent, tree.tokens[node]): node for node, parent in enumerate(tree.parents) if parent >= 0
    }
    path = [0]
    for token in emitted[:-1]:
        path.append(children[path[-1], token])
    return path[1:]


def _ranked(outcomes: Sequence[Outcome]) -> tuple[list[list[int]] | None, Tensor | None]:
    """(the likeliest token after each node, ranked_BNR), where they were asked for."""
    if not outcomes[0].ranked_NR:
        return None, None
    likeliest = [[ranks[0] for ranks in one.ranked_NR] for one in outcomes]
    return likeliest, torch.tensor([one.ranked_NR for one in outcomes])
