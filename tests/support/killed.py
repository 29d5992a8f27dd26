"""A process that is killed amid what it writes."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

DONE, FAILED = 0, 1


def after_each_rename(act: Callable[[], object], before: Callable[[], object]) -> Iterator[int]:
    """Runs `act` in child processes, the n-th of which is killed before its n-th rename, each after
    `before` was called here. Yields n after each kill, for as long as there are renames."""
    for n in count():
        before()
        child = os.fork()
        if child == 0:
            _run(act, n)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == DONE
            return
        yield n


def _run(act: Callable[[], object], n: int) -> None:
    rename, renames = os.replace, count()

    def replace(*arguments: Any, **options: Any) -> None:
        if next(renames) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*arguments, **options)

    os.replace = replace
    code = FAILED
    try:
        act()
        code = DONE
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
