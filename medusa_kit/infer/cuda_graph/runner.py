"""The steps made so far, and the choice of one of them for a request.

There is one step, on CUDA with a captured graph, for each (rows, tree, slots). Rows and slots are
rounded up, and larger steps are used for smaller requests too, so that few are made. What a step
cannot do is verified from the host (decode.py): sampling, processed logits, typical acceptance,
trees that heads grow anew at each step.

Shapes: B batch, S cache slots.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch

from medusa_kit import console
from medusa_kit.heads.prefix_layer import PrefixLayer
from medusa_kit.infer.accept.token_choice import TokenChooser
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.cuda_graph.capture import GraphMemory, can_capture
from medusa_kit.infer.cuda_graph.forward import StaticVerifier
from medusa_kit.infer.cuda_graph.host_trees import HostTreeSpec, HostTreeStep
from medusa_kit.infer.cuda_graph.step import GraphStep
from medusa_kit.infer.draft import Drafter
from medusa_kit.infer.verifier import Forward
from medusa_kit.locks import SharedLock

Step = GraphStep | HostTreeStep
FEWEST_SLOTS = 256
SLOTS_MULTIPLE = 64  # attention kernels are faster where the mask's rows are aligned
# How much larger than needed a step may be. A spare row is computed like any other in all layers;
# a spare slot is at most read by attention, and not by every kernel.
ROWS_TOO_MANY, SLOTS_TOO_MANY = 2, 4
# Steps not in use keep their caches, up to this share of the GPU's memory.
KEPT_SHARE = 0.25
KEPT_ON_HOST = 1 << 30
# A smaller step is made during a request only where a row may still emit so many tokens, since
# making one takes about as long as four steps of the loop.
WORTH_A_STEP = 64

T = TypeVar("T")


class Request(Protocol):
    """What is used here of a row (request.Row)."""

    prompt_ids: list[int]
    token_ids: list[int]
    chooser: TokenChooser
    max_new_tokens: int


class GraphRunner:
    """The steps of one base model. `compiled` makes the forward to use in place of the model's, a
    new one for each step."""

    def __init__(
        self, verifier: StaticVerifier, compiled: Callable[[], Forward] | None = None
    ) -> None:
        self.verifier, self.compiled = verifier, compiled
        self._steps: list[Step] = []  # the most recently used one is last
        self._graphs: GraphMemory | None = None
        self.refused: str | None = None  # why compiling or capturing failed, once it has
        self.rounding_tolerance = 0.0  # how far a compiled step's logits were from a plain one's
        self._lock = SharedLock()
        self._without_prefix: GraphRunner | None = None

    @property
    def without_prefix(self) -> "GraphRunner":
        """The one that this was made from by `with_prefix`."""
        return self._without_prefix or self

    def with_prefix(self, prefix: PrefixLayer | None) -> "GraphRunner":
        """One whose verifier has this layer, or none (`Verifier.with_prefix`). Its steps are its
        own."""
        if prefix is None or prefix is self.verifier.prefix:
            return self if prefix is self.verifier.prefix else self.without_prefix
        plain = self.without_prefix
        runner = GraphRunner(plain.verifier.with_prefix(prefix), plain.compiled)
        runner._without_prefix, runner.refused = plain, plain.refused
        return runner

    @property
    def attention(self) -> AttentionChoice:
        return self.verifier.attention

    @property
    def steps_run_by(self) -> str:
        """For statistics."""
        forward = "torch" if self.compiled is None else "torch.compile"
        graph = " in a CUDA graph" if can_capture(self.verifier.base.device) else ""
        return f"{forward}, fixed shapes{graph} ({self.verifier.attention.name})"

    def may_take(self, drafter: Drafter, row: Request) -> bool:
        """Whether a step can decode such a row."""
        drafted = hasattr(_what_drafts(drafter), "alike")
        return drafted and self.refused is None and row.chooser.takes_argmax

    def lend(self, drafter: Drafter, rows: Sequence[Request]) -> "Loan | None":
        """A step for rows that `may_take` allows, to be given back; or None where they have to be
        decoded without. Raises torch.OutOfMemoryError."""
        with self._lock:
            if self.refused is not None or self.lent is not None:
                return None  # another answer is being streamed
            step = self._step(_what_drafts(drafter), rows)
            return None if step is None else Loan(self, step)

    def with_room(self, work: Callable[[], T]) -> T:
        """What `work` returns. Where memory runs out it is called once more, without the steps that
        are not in use and the caches of earlier requests."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None  # its frames hold tensors
        self.forget()
        gc.collect()  # the loop's caches and their layers refer to each other
        return work()

    def forget(self) -> None:
        """Free the memory of the steps that are not in use."""
        with self._lock:
            for step in [step for step in self._steps if not step.busy]:
                self._drop(step)
            if not self._steps:
                self._graphs = None

    def _drop(self, step: Step) -> None:
        self._steps.remove(step)
        step.free()

    @property
    def lent(self) -> Step | None:
        """The step that is in use."""
        return next((step for step in self._steps if step.busy), None)

    def _step(self, drafter: Drafter, rows: Sequence[Request]) -> Step | None:
        longest = self.longest(drafter, rows)
        found = self._large_enough(drafter, len(rows), longest)
        return found or self.with_room(lambda: self._new_step(drafter, len(rows), longest))

    def smaller(self, step: Step, rows: Sequence[Request], may_make: bool = True) -> Step | None:
        """A step of at most half as many rows for the rest of a request, if there is one or it is
        worth making; it is marked busy. Raises torch.OutOfMemoryError."""
        if 2 * num_rows(len(rows)) > step.batch_size or self.refused is not None:
            return None
        drafter = cast(Drafter, step.drafter)
        longest = self.longest(drafter, rows)
        with self._lock:
            found = self._large_enough(drafter, len(rows), longest, step.batch_size // 2)
            left = max(row.max_new_tokens - len(row.token_ids) for row in rows)
            if found is None and may_make and left >= WORTH_A_STEP and self.compiled is None:
                found = self._new_step(drafter, len(rows), longest)
            if found is not None:
                found.busy = True
            return found

    def larger(self, step: Step, rows: Sequence[Request]) -> Step | None:
        """A step for more rows, or longer ones, than this one takes; it is marked busy."""
        with self._lock:
            found = self._step(cast(Drafter, step.drafter), rows) if self.refused is None else None
            if found is not None:
                found.busy = True
            return found

    def longest(self, drafter: Drafter, rows: Sequence[Request]) -> int:
        """Slots that the longest row may need."""
        most = max(len(row.prompt_ids) + row.max_new_tokens for row in rows)
        return most + drafter.num_nodes - 1

    def _large_enough(
        self, drafter: Drafter, rows: int, slots: int, most_rows: int | None = None
    ) -> Step | None:
        """The smallest existing step that is large enough and not much too large."""
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
        except RuntimeError as error:  # of compiling or capturing; the model itself ran at load
            self.refused = str(error).splitlines()[0]
            self.forget()
            console.warn(f"the loop decodes, since steps of fixed shapes failed: {self.refused}")
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
        """Drop the least recently used steps until the rest fits; the newest always stays."""
        for step in self._steps[:]:
            if sum(one.num_bytes for one in self._steps) <= num_bytes:
                return
            if step is not newest and not step.busy:
                self._drop(step)


class Loan:
    """A step lent to one request, replaced by a smaller one as rows finish."""

    def __init__(self, runner: GraphRunner, step: Step) -> None:
        self._runner, self.step, self._over = runner, step, False
        self._has_room = True  # until there was no memory for a smaller step
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
        if not self._over:  # else it may be lent again by now
            self._over, self.step.busy = True, False

    def fits(self, rows: Sequence[Request]) -> bool:
        """Whether the step is large enough for these rows."""
        longest = self._runner.longest(cast(Drafter, self.step.drafter), rows)
        return len(rows) <= self.step.batch_size and longest <= self.step.num_slots

    def narrow(self, places: Sequence[int], rows: Sequence[Request]) -> bool:
        """Move the rows in these places to the first places of a smaller step; False if there is
        none."""
        may_make = self._has_room
        return self._move(lambda: self._runner.smaller(self.step, rows, may_make), places)

    def widen(self, places: Sequence[int], rows: Sequence[Request]) -> bool:
        """The same to a step that is large enough for `rows`, more than are there."""
        return self._has_room and self._move(lambda: self._runner.larger(self.step, rows), places)

    def _move(self, find: Callable[[], Step | None], places: Sequence[int]) -> bool:
        try:
            step = find()
        except torch.OutOfMemoryError:
            self._has_room = False  # trying takes as long as several steps, so not at every one
            return False
        if step is None:
            return False
        try:
            step.take_over(cast(Any, self.step), places)
        except BaseException:
            step.busy = False
            raise
        self.step.busy, self.step = False, step
        return True


def _what_drafts(drafter: Drafter) -> Any:
    """What steps are made for: the drafter, or what it needs of steps to which it sends trees."""
    return getattr(drafter, "host_trees", None) or drafter


def num_rows(needed: int) -> int:
    """The rows of a new step: 1, 2, 4, 6, 8, 12, 16, ..., so that less than a third are spare."""
    power = 1 << (needed - 1).bit_length()
    return power * 3 // 4 if power > 4 and needed <= power * 3 // 4 else power


def num_slots(needed: int, most: int) -> int:
    """The slots of a new step: a power of two, but no more than can ever be used."""
    rounded = max(FEWEST_SLOTS, 1 << (needed - 1).bit_length())
    return min(rounded, -(-most // SLOTS_MULTIPLE) * SLOTS_MULTIPLE)


def most_kept(device: torch.device) -> int:
    """Bytes that steps not in use may hold."""
    if device.type != "cuda":
        return KEPT_ON_HOST
    return int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
