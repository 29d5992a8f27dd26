"""Work in a thread that neither the end of the program nor anybody's deadline waits for."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_background(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
    """What `work` returns or raises. A pool's threads would be joined at exit, however long they
    take."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name=f"medusa-kit {work.__name__}", daemon=True).start()
    return future
