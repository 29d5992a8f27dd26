"""Zeros that take memory only where something has been written.

Shapes: B rows, G key/value heads, S slots, E head dim.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

SMALL = 1 << 20  # bytes: less is taken at once, from torch's allocator


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on a CPU in pages that the system hands out when they are first written. torch's own
    are all written at once. Raises MemoryError where not even the addresses can be had."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < SMALL:
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        pages = _pages(size)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size / 1e9:.2f} GB could not be reserved ({error})") from error
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def _pages(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would be taken for its first slot
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


def resident_bytes(slots: Tensor, reached: Sequence[int]) -> int:
    """How much memory slots [..., B, G, S, E] take of which each row's first `reached` have been
    written."""
    if slots.device.type != "cpu" or slots.nbytes < SMALL:
        return slots.nbytes
    *outer, _, G, _, E = slots.shape
    a_slot = E * slots.dtype.itemsize
    stretches = math.prod(outer) * G
    pages = sum(math.ceil(count * a_slot / mmap.PAGESIZE) for count in reached)
    return min(stretches * pages * mmap.PAGESIZE, slots.nbytes)
