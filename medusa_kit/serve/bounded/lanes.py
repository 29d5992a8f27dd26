"""Children that look at grammars, and the lines in front of them.

What is quickly looked at never waits behind what is not: all begin in the quick lane, and what
meets its budget there is looked at again in the slow one, which few may wait for.
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import medusa_kit
from medusa_kit.errors import ClosedError, MedusaKitError, QueueFullError
from medusa_kit.serve.bounded.child import Answer, Budget, receive, send

MAX_BYTES = 64 << 20
QUICK = Budget(seconds=0.1, wall=2.0, num_bytes=MAX_BYTES)
SLOW = Budget(seconds=1.0, wall=15.0, num_bytes=MAX_BYTES)
MAX_QUICK, MAX_SLOW = 256, 4  # that wait
PATIENCE = 3.0  # seconds beyond the budget, for a child that answers nothing (stopped, say)
NICE = 5  # of the slow lane: answers under way come first
CLOSED = "the schema checker is closed"
MODULE = "medusa_kit.serve.bounded.child"

Task = tuple[Any, ...]


class Child:
    """A process for one task at a time, started anew where it has ended."""

    def __init__(self, nice: int) -> None:
        self._lock, self._nice = threading.Lock(), nice
        self._closed = False
        self._process = self._started()

    def ask(self, task: Task, budget: Budget) -> Answer:
        """Waits. Raises ClosedError, MedusaKitError where there is no child."""
        for _ in range(2):
            process = self._running()
            answer = _answer(process, task, budget)
            if answer is not None:
                return Answer(*answer)
            process.kill()
            process.wait()
        raise MedusaKitError("the process that looks at grammars ends at once")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            _end(self._process)

    def _running(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._closed:
                raise ClosedError(CLOSED)
            if self._process.poll() is not None:
                _end(self._process)
                self._process = self._started()
            return self._process

    def _started(self) -> "subprocess.Popen[bytes]":
        package_parent = str(Path(medusa_kit.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        code = f"import os; os.nice({self._nice}); from {MODULE} import main; main()"
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip


def _answer(process: "subprocess.Popen[bytes]", task: Task, budget: Budget) -> Any:
    """A process's answer; None from one that ends, or that answers nothing and is ended."""
    watch = threading.Timer(budget.wall + PATIENCE, process.kill)
    watch.daemon = True
    watch.start()
    try:
        send(process.stdin, (task, budget))  # type: ignore[arg-type]
        return receive(process.stdout)  # type: ignore[arg-type]
    except OSError:
        return None
    finally:
        watch.cancel()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            stream.close()  # type: ignore[union-attr]


class Lane:
    """One child, and those who wait for it."""

    def __init__(self, budget: Budget, max_waiting: int, nice: int = 0) -> None:
        self.budget, self._max_waiting = budget, max_waiting
        self._waiting: queue.SimpleQueue[tuple[Task, Future[Answer]] | None] = queue.SimpleQueue()
        self._closed = False
        self._child = Child(nice)
        self._thread = threading.Thread(target=self._work, name="medusa-kit grammars", daemon=True)
        self._thread.start()

    def ask(self, task: Task) -> "Future[Answer]":
        """Raises QueueFullError, ClosedError."""
        if self._closed:
            raise ClosedError(CLOSED)
        if self._waiting.qsize() >= self._max_waiting:
            raise QueueFullError(
                f"{self._max_waiting} slow schemas are queued already",
                hint="ask again later",
            )
        future: Future[Answer] = Future()
        self._waiting.put((task, future))
        return future

    def close(self) -> None:
        self._closed = True
        self._waiting.put(None)
        self._child.close()

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            task, future = item
            if not future.set_running_or_notify_cancel():  # nobody waits any more
                continue
            try:
                future.set_result(self._child.ask(task, self.budget))
            except Exception as error:
                future.set_exception(error)
        while not self._waiting.empty():
            if (item := self._waiting.get()) is not None:
                item[1].set_exception(ClosedError(CLOSED))
