"""A scheduler in a thread of its own, and drafters that stop or fail there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.decode.threaded.request_queue import RequestQueue
from medusa_kit.infer.decode.threaded.submission import Submission
from support.batches import LONGEST, drafters, row_for
from support.wrapped import Wrapped

SOON = 60.0  # seconds after which a test has failed


class Gate(Wrapped):
    """A drafter that stops at each draft until it is opened."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.reached, self.open = threading.Event(), threading.Event()

    def propose(self, state: Any) -> Any:
        self.reached.set()
        assert self.open.wait(SOON)
        return self._inner.propose(state)


class Raises(Wrapped):
    """A drafter that raises at its second draft."""

    def __init__(self, inner: Drafter, error: BaseException) -> None:
        super().__init__(inner)
        self._error, self._drafts = error, 0

    def propose(self, state: Any) -> Any:
        self._drafts += 1
        if self._drafts == 2:
            raise self._error
        return self._inner.propose(state)


def threaded(
    engine: Engine, max_rows: int = 2, verifier: Any = None, **options: Any
) -> RequestQueue:
    scheduler = Scheduler(verifier or engine.verifier, reuse_prefixes=True)
    return RequestQueue(scheduler, max_rows, **options)


def heard(submission: Submission) -> list[int]:
    return [token for emission in submission for token in emission.tokens]


@contextmanager
def stopped(engine: Engine, max_rows: int = 1, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """A thread whose first request has emitted a token and stops there: (thread, it, gate)."""
    gate: Any = Gate(drafters(engine)["heads"])
    with threaded(engine, max_rows, **options) as thread:
        row = row_for(engine, 5, LONGEST, verifier=options.get("verifier"))
        first = thread.submit(row, gate)
        assert gate.reached.wait(SOON)
        try:
            yield thread, first, gate
        finally:
            gate.open.set()
