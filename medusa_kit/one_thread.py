"""Operations of torch by the calling thread alone.

torch shares operations on 32,768 numbers or more out to its OpenMP threads. Once woken they spin
for milliseconds, on cores that the next step in C++ needs, or other threads of ours: for one row of
logits, one thread alone takes less than that.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch's operations on a CPU have this thread alone. Other threads' are as they were,
    which torch.set_num_threads would change. Without effect where OpenMP's library is not known."""
    library = _openmp()
    if library is None:
        yield
        return
    # torch sets a new thread's number when it is asked for, else at the first operation, in here.
    before = torch.get_num_threads()
    library.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)


def can_be_alone() -> bool:
    """Whether `one_thread` has an effect here."""
    return _openmp() is not None


@cache
def _openmp() -> Any:
    """The GNU OpenMP library that torch brings and has loaded, or None."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:  # there, but not in use
            continue
    return None
