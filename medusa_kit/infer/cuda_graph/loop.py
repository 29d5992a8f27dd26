"""Decoding in steps of fixed shapes, from the first root on.

A row that has finished idles in its place, so that shapes and a captured graph stay valid. Once
half of the rows idle, the others move to a smaller step.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from medusa_kit.infer.cuda_graph.accept import walked
from medusa_kit.infer.cuda_graph.runner import Loan
from medusa_kit.infer.request import Emitted, Row


def run_steps(
    loan: Loan, rows: Sequence[Row], roots: Sequence[int], hidden_BD: Tensor
) -> Iterator[Emitted]:
    """Decode rows whose prompts are in the step's cache; yields what each step emitted."""
    loan.graph_step.begin([len(row.prompt_ids) for row in rows], roots, hidden_BD)
    alive = dict(enumerate(rows))
    while True:
        for index, row in list(alive.items()):
            if row.finish_reason is not None:
                loan.graph_step.rest(index)
                del alive[index]
        if not alive:
            return
        if loan.narrow(list(alive), list(alive.values())):
            alive = dict(enumerate(alive.values()))
        results = loan.graph_step.run()
        emitted: Emitted = []
        for index, row in alive.items():
            tokens = walked(results[index])
            kept = row.take(tokens)
            row.count_step(len(kept), len(tokens) - 1)
            emitted.append((row, kept))
        yield emitted
