"""Rows that draft together, by one drafter, and where they stand.

Shapes: B rows, N nodes of a row, V vocabulary.
"""

from collections.abc import Sequence

import torch

from medusa_kit.infer.accept.rows import ScoredTree
from medusa_kit.infer.draft import Draft, Drafter, State, StepResult
from medusa_kit.infer.request import Emitted, Row


class Group:
    """Rows of a batch with the same drafter; `state` is theirs, in the same order."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.rows: list[Row] = []
        self._state: State | None = None

    @property
    def state(self) -> State:
        assert self._state is not None, "a group without rows has no state"
        return self._state

    def add(self, row: Row, state: State) -> None:
        """Let a row join whose prompt has been read."""
        self.drafter.join(state)
        self._state = state if self._state is None else self._state.with_rows(state)
        self.rows.append(row)

    def let_go(self) -> None:
        """Go on without the rows that have finished."""
        alive = [index for index, row in enumerate(self.rows) if row.finish_reason is None]
        self.rows = [self.rows[index] for index in alive]
        self._state = self.state.of_rows(alive) if alive else None
        self.drafter.select_rows(alive)

    def propose(self) -> Draft:
        return self.drafter.propose(self.state)

    def accept(
        self,
        draft: Draft,
        tokens: Sequence[list[int]],
        logits: Sequence[torch.Tensor],
        likeliest: Sequence[list[int]] | None,
        last_position: int,
    ) -> tuple[list[list[int]], list[int]]:
        """Each row's accepted nodes, and its next root. `tokens` of each row's nodes, `logits`
        (N, V) and likeliest tokens after them, where some row needs these."""
        paths, next_roots = [], []
        for index, row in enumerate(self.rows):
            committed, argmax = self.state.tokens[index], row.chooser.takes_argmax
            tree = ScoredTree(
                row.chooser,
                committed,
                tokens[index],
                draft.topologies[index].used_parents,
                logits[index],
                likeliest[index] if argmax and likeliest is not None else None,
                draft.distributions[index] if draft.distributions else {},
            )
            path, root = tree.accept(last_position - len(committed))
            paths.append(path)
            next_roots.append(root)
        return paths, next_roots

    def go_on(self, step: StepResult, tokens: Sequence[list[int]]) -> Emitted:
        """Tell the drafter, emit what was accepted, and move on to the next roots."""
        self.drafter.observe(step)
        emitted: Emitted = []
        for index, (row, path) in enumerate(zip(self.rows, step.paths, strict=True)):
            accepted = [tokens[index][node] for node in path]
            self.state.tokens[index] += [self.state.roots_B[index], *accepted]
            kept = row.take([*accepted, step.next_roots[index]])
            row.count_step(len(kept), len(path))
            emitted.append((row, kept))
        last = [path[-1] if path else 0 for path in step.paths]
        hidden_BD = torch.stack([one[node] for one, node in zip(step.hidden, last, strict=True)])
        roots = list(step.next_roots)
        self._state = State(self.state.tokens, roots, hidden_BD, self.state.choosers)
        return emitted
