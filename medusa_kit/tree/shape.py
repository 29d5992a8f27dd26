"""The shape of a tree of draft tokens: what follows from its parents alone.

Node 0 is the root, the base model's own next token. A parent comes before its children.

Shapes: N nodes with root, W words of 64 bits.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

ROOT = -1  # the root's parent
WORD = 64
Numbers = NDArray[np.int64]


class TreeShape:
    """The parents of a tree's nodes, and what follows from them. Made by `shape_of` and `chain`,
    which return the same object again: trees of few shapes recur."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        self.parents = parents

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths_N(self) -> Numbers:
        depths = list[int]()
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return np.array(depths, np.int64)

    @cached_property
    def children(self) -> list[list[int]]:
        """The children of each node."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[parent].append(node)
        return found

    @cached_property
    def words_NW(self) -> Numbers:
        """Bit j % 64 of word j // 64 says whether a node sees node j: its ancestors and itself."""
        seen = list[int]()
        for node, parent in enumerate(self.parents):
            seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
        size = -(-len(seen) // WORD) * WORD // 8
        packed = b"".join(bits.to_bytes(size, "little") for bits in seen)
        return np.frombuffer(packed, np.dtype("<i8")).reshape(len(seen), -1)

    @cached_property
    def sees_NN(self) -> NDArray[np.bool_]:
        """The same as truth values."""
        N = len(self.parents)
        bits_NX = np.unpackbits(self.words_NW.view(np.uint8), axis=1, bitorder="little")
        return np.ascontiguousarray(bits_NX[:, :N]).view(np.bool_)


@lru_cache(maxsize=1024)
def shape_of(parents: tuple[int, ...]) -> TreeShape:
    """The shape of a tree with these parents; ROOT is the root's."""
    return TreeShape(parents)


@lru_cache(maxsize=64)
def chain(length: int) -> TreeShape:
    """The shape of a piece of text: a tree without branches."""
    return TreeShape(tuple(range(ROOT, length - 1)))


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
