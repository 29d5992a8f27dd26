"""Decoding, the page to read first: propose a tree, verify it in one forward, accept, commit.

Every drafter goes through this loop; plain decoding is the drafter that proposes the root alone.
The root is the base model's own next token: emitted when it is chosen, committed by the next step.

Shapes: B batch, N nodes with root, D hidden, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_kit.infer.accept.rules import Verdict, accept, accept_typical
from medusa_kit.infer.accept.token_choice import TokenChooser
from medusa_kit.infer.cuda_graph.host_tree_loop import run_on_device
from medusa_kit.infer.cuda_graph.runner import GraphRunner, Loan
from medusa_kit.infer.draft import Draft, Drafter, State, StepResult, path_to, tell_end
from medusa_kit.infer.memory import explain_oom
from medusa_kit.infer.request import Emitted, Row
from medusa_kit.infer.transfer import to_device
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier


@torch.inference_mode()
def decode(
    verifier: Verifier, drafter: Drafter, rows: Sequence[Row], graphs: GraphRunner | None = None
) -> Iterator[Emitted]:
    """Decode rows together until all have finished; yields what each step emitted. `graphs`: runs
    whole steps on the device where it can.

    Raises DeviceMemoryError where an accelerator's memory is too small for this request.
    """
    num_slots = max(len(row.prompt_ids) + row.max_new_tokens for row in rows)
    num_slots += drafter.num_nodes - 1
    with explain_oom(verifier.base, len(rows), drafter.num_nodes, num_slots):
        if graphs is None:
            yield from _decode(verifier, drafter, rows, num_slots)
        else:
            with graphs.borrowed(drafter, rows) as loan:
                yield from _decode(verifier, drafter, rows, num_slots, graphs, loan)
    tell_end(drafter, [row.token_ids for row in rows])


def _decode(
    verifier: Verifier,
    drafter: Drafter,
    rows: Sequence[Row],
    num_slots: int,
    graphs: GraphRunner | None = None,
    loan: Loan | None = None,
) -> Iterator[Emitted]:
    """The loop. `loan`: a step that does all of this on the device, from the first root on."""
    _tell_what_runs(verifier, rows, graphs if loan else None)
    cache, hidden_BD, logits_BV = _prefilled(verifier, rows, num_slots, graphs, loan)
    roots = [row.chooser.choose(logits_BV[i], row.prompt_ids) for i, row in enumerate(rows)]
    yield [(row, row.take([root])) for row, root in zip(rows, roots, strict=True)]

    if loan is not None:
        yield from run_on_device(loan, drafter, rows, roots, hidden_BD)
        return
    rows = list(rows)
    choosers = [row.chooser for row in rows]
    state = State([list(row.prompt_ids) for row in rows], roots, hidden_BD, choosers)
    drafter.begin(state)
    while True:
        alive = [index for index, row in enumerate(rows) if row.finish_reason is None]
        if not alive:
            return
        if len(alive) < len(rows):
            rows, state = [rows[i] for i in alive], state.of_rows(alive)
            cache.select_rows(alive)
            drafter.select_rows(alive)

        draft = drafter.propose(state)
        scores = verifier.forward(cache, draft.tokens_BN, draft.depths_BN, draft.sees_BNN)
        hidden_BND, logits_BNV = scores.hidden_BMD, scores.logits_BMV
        likeliest: list[list[int]] | None = None
        if any(row.chooser.takes_argmax for row in rows):  # all that is read in one transfer
            tokens_BN, likeliest = torch.stack([draft.tokens_BN, scores.likeliest()]).tolist()
        else:
            tokens_BN = draft.tokens_BN.tolist()
        paths, next_roots = _accept_rows(
            verifier, rows, state, draft, tokens_BN, logits_BNV, likeliest or []
        )
        cache.commit([[0, *path] for path in paths])
        drafter.observe(
            StepResult(
                draft, paths, next_roots, hidden_BND, logits_BNV, likeliest, scores.ranked_BMR
            )
        )

        emitted: Emitted = []
        for index, (row, path, root) in enumerate(zip(rows, paths, next_roots, strict=True)):
            accepted = [tokens_BN[index][node] for node in path]
            state.tokens[index] += [state.roots_B[index], *accepted]
            kept = row.take([*accepted, root])
            row.count_step(len(kept), len(path))
            emitted.append((row, kept))
        places = [(row, path[-1] if path else 0) for row, path in enumerate(paths)]
        hidden_BD = hidden_BND[to_device(places, hidden_BND.device).unbind(-1)]
        state = State(state.tokens, next_roots, hidden_BD, state.choosers)
        yield emitted


def _tell_what_runs(verifier: Verifier, rows: Sequence[Row], graphs: GraphRunner | None) -> None:
    by, attention = verifier.steps_run_by, verifier.attention
    if graphs is not None:
        by, attention = graphs.name, graphs.verifier.attention
    for row in rows:
        row.steps_run_by, row.attention = by, attention


def _prefilled(
    verifier: Verifier,
    rows: Sequence[Row],
    num_slots: int,
    graphs: GraphRunner | None,
    loan: Loan | None,
) -> tuple[TreeCache, Tensor, Tensor]:
    """(a cache that holds the prompts, hidden_BD, logits_BV at the last token of each)."""

    def prefill() -> tuple[TreeCache, Tensor, Tensor]:
        if loan is None:
            cache = verifier.new_cache(len(rows), num_slots)
        else:
            cache = loan.step.cache.first_rows(len(rows))
        return cache, *verifier.prefill(cache, [row.prompt_ids for row in rows])

    return prefill() if graphs is None else graphs.with_room(prefill)


@dataclass(frozen=True)
class _Nodes:
    """One row's tree as the base model scored it. Logits are processed only at nodes that a rule
    asks for."""

    chooser: TokenChooser
    committed: list[int]
    tokens: list[int]
    parents: tuple[int, ...]
    logits_NV: Tensor
    distributions: Mapping[int, Tensor] = field(default_factory=dict)  # see Draft.distributions

    def prefix(self, node: int) -> list[int]:
        """All tokens up to `node`: prompt, committed tokens, the node's path."""
        return [*self.committed, *(self.tokens[n] for n in path_to(node, self.parents))]

    def choose(self, node: int) -> int:
        logits_V, prefix = self.logits_NV[node], self.prefix(node)
        if (distribution_V := self.distributions.get(node)) is None:
            return self.chooser.choose(logits_V, prefix)
        children = [self.tokens[n] for n, parent in enumerate(self.parents) if parent == node]
        return self.chooser.choose_drawn(logits_V, prefix, distribution_V, children)

    def judge(self, node: int, guesses: list[int]) -> Verdict:
        return self.chooser.judge(self.logits_NV[node], self.prefix(node), guesses)


def _accept_rows(
    verifier: Verifier,
    rows: Sequence[Row],
    state: State,
    draft: Draft,
    tokens_BN: list[list[int]],
    logits_BNV: Tensor,
    likeliest: list[list[int]],
) -> tuple[list[list[int]], list[int]]:
    """Each row's accepted nodes and next root. `likeliest`: used for rows that take the argmax."""
    last_position = verifier.base.info.context_length - 1
    paths, next_roots = [], []
    for index, row in enumerate(rows):
        nodes = _Nodes(
            row.chooser,
            state.tokens[index],
            tokens_BN[index],
            draft.topologies[index].parents,
            logits_BNV[index],
            draft.distributions[index] if draft.distributions else {},
        )
        max_depth = last_position - len(state.tokens[index])
        if row.chooser.params.lossy:
            path, root = accept_typical(nodes.tokens, nodes.parents, nodes.judge, max_depth)
        else:
            choose = likeliest[index].__getitem__ if row.chooser.takes_argmax else nodes.choose
            path, root = accept(nodes.tokens, nodes.parents, choose, max_depth)
        paths.append(path)
        next_roots.append(root)
    return paths, next_roots
