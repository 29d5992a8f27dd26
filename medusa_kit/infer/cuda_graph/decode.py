"""Requests whose steps run whole on the device: prompts are read, then `run_on_device` goes on.

Shapes: B rows, D hidden, V vocabulary.
"""

from collections.abc import Generator, Sequence

from torch import Tensor

from medusa_kit.infer.cuda_graph.host_tree_loop import run_on_device
from medusa_kit.infer.cuda_graph.runner import GraphRunner, Loan
from medusa_kit.infer.draft import Drafter, tell_end
from medusa_kit.infer.request import Emitted, Row
from medusa_kit.infer.verifier import Verifier


def decode_on_device(
    graphs: GraphRunner, verifier: Verifier, drafter: Drafter, rows: Sequence[Row], max_rows: int
) -> Generator[Emitted, None, list[Row]]:
    """Decode, `max_rows` at a time, the rows for which there is a step; returns the others."""
    others: list[Row] = []
    for first in range(0, len(rows), max_rows):
        some = rows[first : first + max_rows]
        with graphs.borrowed(drafter, some) as loan:
            if loan is None:
                others += some
                continue
            for row in some:
                row.begin(graphs.name, graphs.verifier.attention)
            hidden_BD, logits_BV = _prefilled(graphs, verifier, some, loan)
            roots = [row.chooser.choose(logits_BV[i], row.prompt_ids) for i, row in enumerate(some)]
            yield [(row, row.take([root])) for row, root in zip(some, roots, strict=True)]
            yield from run_on_device(loan, drafter, some, roots, hidden_BD)
        tell_end(drafter, [row.token_ids for row in some])
    return others


def _prefilled(
    graphs: GraphRunner, verifier: Verifier, rows: Sequence[Row], loan: Loan
) -> tuple[Tensor, Tensor]:
    """(hidden_BD, logits_BV) at the last token of each prompt, which the step's cache then has."""

    def prefill() -> tuple[Tensor, Tensor]:
        cache = loan.step.cache.first_rows(len(rows))
        return verifier.prefill(cache, [row.prompt_ids for row in rows])

    return graphs.with_room(prefill)
