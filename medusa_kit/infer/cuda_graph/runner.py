"""The steps made so far, and which of them decodes a request.

One step, and on CUDA one captured graph, for each (rows, tree, slots); rows and slots are rounded
up and larger steps lend themselves to smaller requests, so that few are made. What a step cannot do
stays on the loop of decode.py: sampling, processed logits, typical acceptance, trees that change
from step to step.

Shapes: B batch, S cache slots.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch

from medusa_kit import console
from medusa_kit.infer.accept.token_choice import TokenChooser
from medusa_kit.infer.cuda_graph.capture import GraphMemory, can_capture
from medusa_kit.infer.cuda_graph.forward import StaticVerifier
from medusa_kit.infer.cuda_graph.host_trees import HostTreeSpec, HostTreeStep
from medusa_kit.infer.cuda_graph.step import GraphStep
from medusa_kit.infer.draft import Drafter
from medusa_kit.infer.verifier import Forward
from medusa_kit.locks import SharedLock

Step = GraphStep | HostTreeStep
FEWEST_SLOTS = 256
SLOTS_MULTIPLE = 64  # attention kernels like rows of the mask that are aligned
# How much larger than asked for a step may be that is used again. A row too many is computed like
# any other in all layers; a slot too many is at most read by attention, and by some kernels not.
ROWS_TOO_MANY, SLOTS_TOO_MANY = 2, 4
# Steps that wait for their next request keep their caches, up to this share of the GPU's memory.
KEPT_SHARE = 0.25
KEPT_ON_HOST = 1 << 30
# A smaller step is made during a request only for a row that may still emit so many
# tokens: making one takes about as long as four steps of the loop.
WORTH_A_STEP = 64

T = TypeVar("T")


class Request(Protocol):
    """What matters of a row here (request.Row)."""

    prompt_ids: list[int]
    token_ids: list[int]
    chooser: TokenChooser
    max_new_tokens: int


class GraphRunner:
    """The steps of one base model. `compiled` makes what runs in place of the model's forward, anew
    for each step."""

    def __init__(
        self, verifier: StaticVerifier, compiled: Callable[[], Forward] | None = None
    ) -> None:
        self.verifier, self.compiled = verifier, compiled
        self._steps: list[Step] = []  # the one used last comes last
        self._graphs: GraphMemory | None = None
        self.refused: str | None = None  # why compiling or capturing failed, once it has
        self.rounding_tolerance = 0.0  # how far a compiled step's logits were from a plain one's
        self._lock = SharedLock()

    @property
    def name(self) -> str:
        """For statistics: what runs the steps."""
        forward = "torch" if self.compiled is None else "torch.compile"
        graph = " in a CUDA graph" if can_capture(self.verifier.base.device) else ""
        return f"{forward}, fixed shapes{graph} ({self.verifier.attention.name})"

    @contextmanager
    def borrowed(self, drafter: Drafter, rows: Sequence[Request]) -> "Iterator[Loan | None]":
        """A step for these rows, or None where the loop has to decode them; it is theirs alone."""
        drafter = getattr(drafter, "host_trees", None) or drafter
        with self._lock:
            step = self._step(drafter, rows) if self._applies(drafter, rows) else None
            loan = None if step is None else Loan(self, step)
        try:
            yield loan
        except torch.OutOfMemoryError:
            if loan is not None:
                loan.give_back()
            self.forget()
            raise
        finally:
            if loan is not None:
                loan.give_back()

    def with_room(self, work: Callable[[], T]) -> T:
        """What `work` returns; where memory runs out, once more without the steps that wait and
        the caches of earlier requests."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None  # its frames hold tensors
        self.forget()
        gc.collect()  # the loop's caches and their layers hold each other
        return work()

    def forget(self) -> None:
        """Give back the memory of the steps that are not in use."""
        with self._lock:
            for step in [step for step in self._steps if not step.busy]:
                self._drop(step)
            if not self._steps:
                self._graphs = None

    def _drop(self, step: Step) -> None:
        self._steps.remove(step)
        step.free()

    def _applies(self, drafter: Drafter, rows: Sequence[Request]) -> bool:
        return (
            self.refused is None
            and hasattr(drafter, "alike")
            and all(row.chooser.takes_argmax for row in rows)
            and not any(step.busy for step in self._steps)  # one answer streams, another is asked
        )

    def _step(self, drafter: Drafter, rows: Sequence[Request]) -> Step | None:
        longest = self._longest(drafter, rows)
        found = self._large_enough(drafter, len(rows), longest)
        return found or self.with_room(lambda: self._new_step(drafter, len(rows), longest))

    def smaller(self, step: Step, rows: Sequence[Request], may_make: bool = True) -> Step | None:
        """A step of half as many rows or less for what is left of a request, if one is at hand or
        worth making; it is marked busy. Raises torch.OutOfMemoryError."""
        if 2 * num_rows(len(rows)) > step.batch_size or self.refused is not None:
            return None
        drafter = cast(Drafter, step.drafter)
        longest = self._longest(drafter, rows)
        with self._lock:
            found = self._large_enough(drafter, len(rows), longest, step.batch_size // 2)
            left = max(row.max_new_tokens - len(row.token_ids) for row in rows)
            if found is None and may_make and left >= WORTH_A_STEP and self.compiled is None:
                found = self._new_step(drafter, len(rows), longest)
            if found is not None:
                found.busy = True
            return found

    def _longest(self, drafter: Drafter, rows: Sequence[Request]) -> int:
        """Slots that the longest row may come to need."""
        most = max(len(row.prompt_ids) + row.max_new_tokens for row in rows)
        return most + drafter.num_nodes - 1

    def _large_enough(
        self, drafter: Drafter, rows: int, slots: int, most_rows: int | None = None
    ) -> Step | None:
        """The least of the steps at hand that holds so much and is not much too large."""
        most_rows = most_rows or max(num_rows(rows), ROWS_TOO_MANY * rows)
        most_slots = max(self._slots(drafter, slots), SLOTS_TOO_MANY * slots)
        fitting = [
            step
            for step in self._steps
            if rows <= step.batch_size <= most_rows
            and slots <= step.num_slots <= most_slots
            and not step.busy
            and step.drafter.alike(drafter)
        ]
        if not fitting:
            return None
        step = min(fitting, key=lambda one: (one.batch_size, one.num_slots))
        self._steps.remove(step)
        self._steps.append(step)
        return step

    def _slots(self, drafter: Drafter, needed: int) -> int:
        return num_slots(needed, self.verifier.base.info.context_length + drafter.num_nodes - 1)

    def _new_step(self, drafter: Drafter, rows: int, slots: int) -> Step | None:
        device = self.verifier.base.device
        if self._graphs is None and can_capture(device):
            self._graphs = GraphMemory(device)
        try:
            step = self._made(drafter, num_rows(rows), self._slots(drafter, slots))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # compiling or the capture; the model itself has run at load
            self.refused = str(error).splitlines()[0]
            self.forget()
            console.warn(f"steps of fixed shapes are given up for the loop: {self.refused}")
            return None
        self.rounding_tolerance = max(self.rounding_tolerance, step.rounding_tolerance)
        self._steps.append(step)
        self._keep_within(most_kept(device), step)
        return step

    def _made(self, drafter: Any, rows: int, slots: int) -> Step:
        if isinstance(drafter, HostTreeSpec):
            return HostTreeStep(self.verifier, drafter, rows, slots, self.compiled, self._graphs)
        compiled = self.compiled() if self.compiled else None
        return GraphStep(self.verifier, drafter, rows, slots, compiled, self._graphs)

    def _keep_within(self, num_bytes: int, newest: Step) -> None:
        """Drop what was used longest ago until the rest fits; the newest stays in any case."""
        for step in self._steps[:]:
            if sum(one.num_bytes for one in self._steps) <= num_bytes:
                return
            if step is not newest and not step.busy:
                self._drop(step)


class Loan:
    """A step that is one request's alone, exchanged for a smaller one as its rows finish."""

    def __init__(self, runner: GraphRunner, step: Step) -> None:
        self._runner, self.step, self._over = runner, step, False
        self._has_room = True  # until a smaller step found none
        step.busy = True

    @property
    def graph_step(self) -> GraphStep:
        """The step, where it drafts by itself."""
        return cast(GraphStep, self.step)

    @property
    def host_tree_step(self) -> HostTreeStep:
        """The step, where its trees come from the host."""
        return cast(HostTreeStep, self.step)

    def give_back(self) -> None:
        if not self._over:  # it may be another's by now
            self._over, self.step.busy = True, False

    def narrow(self, places: Sequence[int], rows: Sequence[Request]) -> bool:
        """Go on with the rows in these places alone, from the first place on, in a smaller step;
        False where it stays as it is."""
        try:
            smaller = self._runner.smaller(self.step, rows, self._has_room)
        except torch.OutOfMemoryError:
            self._has_room = False  # asked at every step, and making one takes as long as several
            return False
        if smaller is None:
            return False
        try:
            smaller.take_over(cast(Any, self.step), places)
        except BaseException:
            smaller.busy = False
            raise
        self.step.busy, self.step = False, smaller
        return True


def num_rows(needed: int) -> int:
    """Rows to make where `needed` are: 1, 2, 4, 6, 8, 12, 16, ..., so that under a third idle."""
    power = 1 << (needed - 1).bit_length()
    return power * 3 // 4 if power > 4 and needed <= power * 3 // 4 else power


def num_slots(needed: int, most: int) -> int:
    """Slots to make where `needed` are: a power of two, but no more than can ever be used."""
    rounded = max(FEWEST_SLOTS, 1 << (needed - 1).bit_length())
    return min(rounded, -(-most // SLOTS_MULTIPLE) * SLOTS_MULTIPLE)


def most_kept(device: torch.device) -> int:
    """Bytes that steps may hold while they wait."""
    if device.type != "cuda":
        return KEPT_ON_HOST
    return int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
