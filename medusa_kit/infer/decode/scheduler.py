"""The scheduler of a base model: has the requests of any number of callers decoded together.

Callers wait in their own threads. What they share (batches.py) belongs to one thread, which makes
the steps of all (step_thread.py).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch

from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.errors import DeviceMemoryError, Live
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.batches import Batches
from medusa_kit.infer.decode.caller import Caller, Waiting
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.measured import MeasuredSteps
from medusa_kit.infer.decode.node_choice.cost import LearnedSteps
from medusa_kit.infer.decode.request import Emitted, Request
from medusa_kit.infer.decode.step_thread import End, StepThread
from medusa_kit.infer.memory import explain_oom
from medusa_kit.infer.verifier import Verifier

KEPT_BYTES = 1 << 29
KEPT_SHARE = 0.25  # of a device's memory: an 8B model's conversation of 64k tokens takes 8 GB


class Scheduler(Live):
    """The requests of one base model, of any number of callers.

    `verifier`: for requests that name none. `reuse_prefixes`: off, batches are kept for the
    forwards captured over their caches alone. `kept_bytes`: of keys and values in batches without
    requests; 0: none is kept. `steps`: their cost; draft tokens that do not gain are not verified.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        reuse_prefixes: bool = False,
        kept_bytes: int = 0,
        steps: MeasuredSteps | LearnedSteps | None = None,
    ) -> None:
        self.verifier = verifier
        self.batches = Batches(
            verifier, reuse_prefixes=reuse_prefixes, kept_bytes=kept_bytes, steps=steps
        )
        self.thread = StepThread(self.batches)
        # Neither holds the other, so that an engine is freed with its last user.
        self.batches.is_asked = partial(_is_asked, ref(self.thread))

    @property
    def steps(self) -> MeasuredSteps | LearnedSteps | None:
        """What steps cost, where that is known."""
        return self.batches.steps

    @property
    def reuse_prefixes(self) -> bool:
        return self.batches.reuse_prefixes

    def decode(
        self, requests: Sequence[Request], drafter: Drafter, max_rows: int | None = None
    ) -> None:
        """Decode requests of one verifier to their ends, at most `max_rows` of them together.
        Several threads may do so at once: their requests share steps.

        Raises DeviceMemoryError where memory is too small; a smaller request works. Raises
        ModelChangedError where the model changed meanwhile, and what `up_to_date` raises. Raises
        what a request failed of.
        """
        max_rows = min(max_rows or len(requests), len(requests))
        for _ in self._news(requests, drafter, Waiting(max_rows)):
            pass

    def run(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        max_rows: int | None = None,
        note: Callable[[Emitted], Any] = lambda emitted: emitted,
    ) -> Iterator[Any]:
        """As `decode`; yields what each step emitted, or what `note` makes of it. No step is made
        of these requests until it is read on."""
        max_rows = min(max_rows or len(requests), len(requests))
        return self._news(requests, drafter, Waiting(max_rows, each_step=True, note=note))

    def prepare(self, caller: Caller, watched: Sequence[int] = ()) -> None:
        """Make a batch that stays as long as the caller, and what its first requests would wait
        for. `watched`: layers that drafters may read. Raises DeviceMemoryError."""
        self._note_settings(caller)
        try:
            self.thread.hand_and_wait(partial(self.batches.prepare, caller, watched))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceMemoryError(
                f"{self.verifier.base.info.device} has no room for a batch of {caller.max_rows} "
                f"requests ({error})",
                hint="give a smaller --max-rows or --batch-size, or end what else takes memory",
            ) from error

    @property
    def idle(self) -> list[Batch]:
        """Batches without requests, with what they keep for later ones; the last was used last."""
        found = list[Batch]()
        self.thread.hand_and_wait(lambda: found.extend(self.batches.idle))
        return found

    def _news(
        self, requests: Sequence[Request], drafter: Drafter, caller: Waiting
    ) -> Iterator[Any]:
        thread, rows = self.thread, caller.max_rows
        longest = max(request.num_positions for request in requests)
        with explain_oom(
            self.verifier.base, rows, drafter.num_nodes, longest + drafter.num_nodes - 1
        ):
            self._note_settings(caller)
            thread.refuse_within()
            try:
                thread.hand(partial(self._begin, requests, drafter, caller))
                while not isinstance(news := caller.news.get(), End):
                    yield news
                    thread.refuse_within()
                    thread.hand(caller.want)
                news.raise_error()
            except GeneratorExit:  # nobody reads on, maybe since Python collects garbage
                caller.has_left = True
                thread.hand_later(partial(self.batches.leave, caller))
                raise
            except BaseException as error:  # such as Ctrl-C
                caller.has_left = True
                # The step under way ends first, so that nothing is added to what the caller has.
                thread.hand_and_wait(partial(self.batches.leave, caller))
                if is_out_of_memory(error):
                    thread.hand_and_wait(self.batches.make_memory)
                raise
            finally:
                caller.has_left = True

    def _begin(self, requests: Sequence[Request], drafter: Drafter, caller: Waiting) -> None:
        """In the thread."""
        if caller.has_left:
            return
        try:
            self.batches.begin(requests, drafter, caller)
        except BaseException as error:
            caller.end(error)

    def _note_settings(self, caller: Caller) -> None:
        """What torch keeps for each thread, and what steps depend on."""
        kind = self.verifier.base.device.type
        if torch.is_autocast_enabled(kind):
            caller.autocast = torch.get_autocast_dtype(kind)


def _is_asked(thread: "ref[StepThread]") -> bool:
    owner = thread()
    return owner is not None and owner.is_asked


def max_kept_bytes(device: torch.device) -> int:
    """Bytes that the KV caches of idle batches may take."""
    if device.type != "cuda":
        return KEPT_BYTES
    return int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
