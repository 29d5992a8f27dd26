"""Decodes a list of rows: they join one batch (batch.py has the loop) and leave it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from medusa_kit.infer.batch import Batch
from medusa_kit.infer.draft import Drafter
from medusa_kit.infer.memory import explain_oom
from medusa_kit.infer.node_choice.cost import StepCost
from medusa_kit.infer.request import Emitted, Request
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients


@no_gradients
def decode(
    verifier: Verifier,
    drafter: Drafter,
    rows: Sequence[Request],
    max_rows: int | None = None,
    lender: "Lender | None" = None,
    cost: StepCost | None = None,
) -> Iterator[Emitted]:
    """Decode rows until all have finished, at most `max_rows` of them together; yields what each
    step emitted. `lender`: has batches of earlier requests, which may hold what prompts begin with.
    `cost`: of steps; guesses that do not pay are not verified then.

    Raises DeviceMemoryError where memory is too small; a smaller request works. Raises what a row
    failed of.
    """
    verifier = verifier.with_watched(drafter.watches)
    max_rows = min(max_rows or len(rows), len(rows))
    tree = verifier.slots_of_tree(drafter.num_nodes)
    num_slots = max(row.num_slots for row in rows) + tree - 1
    with explain_oom(verifier.base, max_rows, drafter.num_nodes, num_slots):
        prompts = [row.prompt_ids for row in rows]
        lend = lender.borrowed if lender is not None else _new_batch
        with lend(verifier, prompts, max_rows, num_slots) as batch:
            batch.cost = cost
            try:
                for row in rows:
                    batch.add(row, drafter)
                while batch.num_rows:
                    if emitted := batch.step():
                        yield emitted
                    batch.raise_error()
            except GeneratorExit:  # not read to its end; that is between two steps
                batch.clear()
                raise
            except torch.OutOfMemoryError:
                verifier.make_room()
                raise


class Lender(Protocol):
    """Lends batches (kept_batches.py)."""

    def borrowed(
        self,
        verifier: Verifier,
        prompts: Sequence[Sequence[int]],
        max_rows: int,
        num_slots: int,
    ) -> "AbstractContextManager[Batch]":
        """A batch for at most `max_rows` rows at once, which may hold what prompts begin with."""


@contextmanager
def _new_batch(
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    max_rows: int,
    num_slots: int,
) -> Iterator[Batch]:
    yield Batch(verifier, max_rows, num_slots, reuse_prefixes=False)
