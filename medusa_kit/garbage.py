"""Python's search for garbage, which is put off where it would do harm."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search() -> Iterator[None]:
    """Not meanwhile. What is imported stays, for one: looking through all of it again and again,
    as it grows, takes as long as a third of the imports."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
