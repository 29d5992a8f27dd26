"""Trees as the host describes them to a captured forward: depths, and ancestors as bits.

Shapes: N nodes with root, W words of 64 bits.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

WORD = 64
Numbers = NDArray[np.int64]


class HostTree(NamedTuple):
    """Depths and ancestors of nodes. `words_NW`: bit j % 64 of word j // 64 says whether a node
    sees node j."""

    depths_N: Numbers
    words_NW: Numbers


class Described(Protocol):
    """What can describe its tree."""

    @property
    def on_host(self) -> HostTree: ...


def host_tree(parents: Sequence[int]) -> HostTree:
    """The description of a tree given by its parents; a negative one is none."""
    depths, seen = list[int](), list[int]()
    for node, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    size = -(-len(parents) // WORD) * WORD // 8
    packed = b"".join(bits.to_bytes(size, "little") for bits in seen)
    words = np.frombuffer(packed, np.dtype("<i8")).reshape(len(parents), -1)
    return HostTree(np.array(depths, np.int64), words)


class Chain:
    """A tree without branches."""

    def __init__(self, length: int) -> None:
        self._length = length

    @property
    def on_host(self) -> HostTree:
        return _chain(self._length)


@lru_cache(maxsize=64)
def _chain(length: int) -> HostTree:
    return host_tree(range(-1, length - 1))
