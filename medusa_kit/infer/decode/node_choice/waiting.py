"""How long the threads of this process waited for a processor that another program had.

Linux counts it for each thread (schedstat). Where nobody does, no thread is known to have waited.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

THREADS = Path("/proc/self/task")
Waits = Callable[[], Mapping[str, float]]


def waits() -> dict[str, float]:
    """Seconds so far by thread: of being ready to compute, with no processor to do so."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in THREADS.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended
                found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


def longest(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Seconds that one of the threads waited meanwhile, of that which waited most."""
    return max((seconds - before.get(name, 0.0) for name, seconds in after.items()), default=0.0)
