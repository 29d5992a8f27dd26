"""A row given to a batch's thread: what it has emitted, read or waited for in other threads."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from medusa_kit.errors import ClosedError, ConfigError
from medusa_kit.infer.details import TokenScore, VerifiedTree
from medusa_kit.infer.draft import Drafter
from medusa_kit.infer.request import Request

OnTokens = Callable[[list[int]], None]


class Emission(NamedTuple):
    """What a step emitted of a row. The first `num_guessed` tokens came from its drafter;
    `credits`: from which of its sources, where it has several. `scores`, `tree`: where the row
    wants them."""

    tokens: list[int]
    num_guessed: int = 0
    credits: list[str] | None = None
    scores: list[TokenScore] | None = None
    tree: VerifiedTree | None = None


class Ticket:
    """A submission as the batch's thread sees it. It does not keep the submission alive."""

    def __init__(
        self,
        row: Request,
        drafter: Drafter,
        on_tokens: OnTokens | None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self.row, self.drafter, self.on_tokens, self.at_end = row, drafter, on_tokens, at_end
        self.changed = threading.Condition()
        self.emissions: deque[Emission] = deque()
        self.done = self._begun = False
        self.drafter_name: str | None = None  # as its drafter's statistics were at the end
        self.drafter_notes: list[str] = []

    def push(self, tokens: list[int]) -> None:
        row = self.row
        told = Emission(tokens, row.num_guessed, row.credits, row.scores, row.tree)
        if not self._begun:  # the row may have made its first step in the same one of the batch
            told, self._begun = Emission(tokens, scores=row.first_scores), True
        with self.changed:
            self.emissions.append(told)
            self.changed.notify_all()
        if self.on_tokens is not None:
            self.on_tokens(tokens)

    def end(self) -> None:
        if self.at_end is not None:
            self.at_end()
        with self.changed:
            self.done = True
            self.changed.notify_all()
        if self.on_tokens is not None:
            self.on_tokens([])


class Submission:
    """Iterate over it for what each step emits, in any thread; each emission is read once. The end
    raises what the row failed of. Dropping it cancels the row, unless that has `on_tokens`."""

    def __init__(
        self, ticket: Ticket, cancel: Callable[[Ticket], None], in_own_thread: Callable[[], bool]
    ) -> None:
        """`in_own_thread`: whether the caller runs in the batch's thread; what it is bound to lives
        as long as its submissions."""
        self._ticket, self._cancel, self._in_own_thread = ticket, cancel, in_own_thread
        self._pid = os.getpid()

    @property
    def row(self) -> Request:
        """The row, which belongs to the batch's thread until `done`."""
        return self._ticket.row

    @property
    def done(self) -> bool:
        """Whether it has ended: finished, cancelled or failed."""
        return self._ticket.done

    @property
    def error(self) -> Exception | None:
        """What it failed of, once it is done."""
        return self.row.error if self.done else None

    @property
    def drafter_name(self) -> str:
        """With its drafter's statistics, which rows that drafted with it share, once it is done."""
        return self._ticket.drafter_name or ""

    @property
    def drafter_notes(self) -> list[str]:
        return self._ticket.drafter_notes

    def cancel(self) -> None:
        """End the row within a step of the batch; it keeps what it has emitted. From any thread."""
        if not self.done:
            self._cancel(self._ticket)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, for so many seconds at most; whether it has come."""
        with self._waiting():
            return self._ticket.changed.wait_for(lambda: self._ticket.done, timeout)

    def result(self) -> Request:
        """The row, once it has ended. Raises what it failed of."""
        self.wait()
        if self.row.error is not None:
            raise self.row.error
        return self.row

    def take(self) -> list[Emission]:
        """What has been emitted and not been read yet, without a wait."""
        with self._ticket.changed:
            found = list(self._ticket.emissions)
            self._ticket.emissions.clear()
        return found

    def __iter__(self) -> Iterator[Emission]:
        ticket = self._ticket
        while True:
            with self._waiting():
                ticket.changed.wait_for(lambda: ticket.emissions or ticket.done)
                emission = ticket.emissions.popleft() if ticket.emissions else None
            if emission is None:
                break
            yield emission
        self.result()

    def _waiting(self) -> threading.Condition:
        """To be held. Raises where the wait would never end."""
        check_process(self._pid)
        if self._in_own_thread() and not self.done:
            raise ConfigError(
                "the batch's own thread cannot wait for one of its requests",
                hint="wait in another thread: `on_tokens` runs in the batch's",
            )
        return self._ticket.changed

    def __del__(self) -> None:
        if self._ticket.on_tokens is None:
            self.cancel()


def check_process(pid: int) -> None:
    """Raises ClosedError in a forked child, which has no thread of its parent's."""
    if os.getpid() != pid:
        raise ClosedError(
            f"the batch's thread is in process {pid}; this is process {os.getpid()}",
            hint="a forked process needs a batch of its own",
        )
