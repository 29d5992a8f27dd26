"""Decoding in steps whose trees come from the host: the drafter runs there, all else on the device.

Shapes: B batch, N nodes with root, R likeliest tokens after a node, D hidden.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from medusa_kit.infer.cuda_graph.host_trees import HostTreeSpec, HostTreeStep, Outcome, Tree
from medusa_kit.infer.cuda_graph.loop import run_steps
from medusa_kit.infer.cuda_graph.runner import Loan
from medusa_kit.infer.draft import Drafter, State, StepResult
from medusa_kit.infer.request import Emitted, Row

NOTHING = torch.empty(0)  # in place of hidden states and logits, which stay on the device


class HostTreeDrafter(Drafter, Protocol):
    """A drafter that needs only what such steps return."""

    host_trees: HostTreeSpec | None

    def use_host_trees(self) -> None:
        """Guess on the host from now on; the heads' guesses come with the state."""


def run_on_device(
    loan: Loan, drafter: Drafter, rows: Sequence[Row], roots: Sequence[int], hidden_BD: Tensor
) -> Iterator[Emitted]:
    """Decode rows whose prompts are in the step's cache, by the loop for the kind of step."""
    if isinstance(loan.step, HostTreeStep):
        return run_host_trees(loan, cast(HostTreeDrafter, drafter), rows, roots, hidden_BD)
    return run_steps(loan, rows, roots, hidden_BD)


def run_host_trees(
    loan: Loan,
    drafter: HostTreeDrafter,
    rows: Sequence[Row],
    roots: Sequence[int],
    hidden_BD: Tensor,
) -> Iterator[Emitted]:
    """Decode rows whose prompts are in the step's cache; yields what each step emitted."""
    loan.host_tree_step.begin([len(row.prompt_ids) for row in rows])
    drafter.use_host_trees()
    rows, places = list(rows), list(range(len(rows)))
    choosers = [row.chooser for row in rows]
    tokens = [list(row.prompt_ids) for row in rows]
    guesses = _first_guesses(loan.host_tree_step.drafter, hidden_BD, roots)
    state = State(tokens, list(roots), NOTHING, choosers, guesses)
    drafter.begin(state)
    while True:
        alive = [index for index, row in enumerate(rows) if row.finish_reason is None]
        if not alive:
            return
        if len(alive) < len(rows):
            for index in set(range(len(rows))) - set(alive):
                loan.host_tree_step.rest(places[index])
            rows, places = [rows[i] for i in alive], [places[i] for i in alive]
            state = state.of_rows(alive)
            drafter.select_rows(alive)
        if loan.narrow(places, rows):
            places = list(range(len(rows)))
        draft = drafter.propose(state)
        trees = [
            Tree(tokens, topology.parents)
            for tokens, topology in zip(draft.tokens_BN.tolist(), draft.topologies, strict=True)
        ]
        by_row = loan.host_tree_step.run(dict(zip(places, trees, strict=True)))
        outcomes = [by_row[place] for place in places]
        paths = [_path(tree, one.emitted) for tree, one in zip(trees, outcomes, strict=True)]
        next_roots = [one.emitted[-1] for one in outcomes]
        drafter.observe(StepResult(draft, paths, next_roots, NOTHING, NOTHING, *_ranked(outcomes)))
        emitted: Emitted = []
        for index, (row, one) in enumerate(zip(rows, outcomes, strict=True)):
            state.tokens[index] += [state.roots_B[index], *one.emitted[:-1]]
            kept = row.take(one.emitted)
            row.count_step(len(kept), len(one.emitted) - 1)
            emitted.append((row, kept))
        guesses = [one.guesses for one in outcomes] if guesses is not None else None
        state = State(state.tokens, next_roots, NOTHING, state.choosers, guesses)
        yield emitted


def _first_guesses(
    host_trees: HostTreeSpec, hidden_BD: Tensor, roots: Sequence[int]
) -> Sequence[Sequence[int]] | None:
    """The heads' tree after the prompts."""
    if host_trees.heads is None:
        return None
    roots_B = torch.tensor(roots, device=hidden_BD.device)
    guesses: list[list[int]] = host_trees.heads.fill(hidden_BD, roots_B).tolist()
    return guesses


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
