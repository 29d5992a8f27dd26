"""A batch in a thread of its own, and drafters that stop or fail there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.request import Request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.decode.threaded.scheduler_thread import SchedulerThread
from medusa_kit.infer.decode.threaded.submission import Submission
from medusa_kit.infer.draft import Drafter
from support.batches import LONGEST, alone, drafters, row_for

SOON = 60.0  # seconds after which a test has failed


class Gate:
    """A drafter that stops at each draft until it is opened."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.reached, self.open = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, state: Any) -> Any:
        self.reached.set()
        assert self.open.wait(SOON)
        return self._inner.propose(state)


class Raises:
    """A drafter that raises at its second draft."""

    def __init__(self, inner: Drafter, error: BaseException) -> None:
        self._inner, self._error, self._drafts = inner, error, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, state: Any) -> Any:
        self._drafts += 1
        if self._drafts == 2:
            raise self._error
        return self._inner.propose(state)


def threaded(engine: Engine, max_rows: int = 2, **options: Any) -> SchedulerThread:
    return SchedulerThread(Scheduler(engine.verifier, max_rows, reuse_prefixes=True), **options)


def exact(family: str, row: Request) -> list[int]:
    return alone(family, len(row.prompt_ids), not row.sampler.params.greedy)[: row.max_new_tokens]


def heard(submission: Submission) -> list[int]:
    return [token for emission in submission for token in emission.tokens]


@contextmanager
def stopped(engine: Engine, max_rows: int = 1, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """A batch whose first row has emitted a token and stops there: (thread, row, gate)."""
    gate = Gate(drafters(engine)["heads"])
    with threaded(engine, max_rows, **options) as thread:
        first = thread.submit(row_for(engine, 5, LONGEST), gate)
        assert gate.reached.wait(SOON)
        try:
            yield thread, first, gate
        finally:
            gate.open.set()
