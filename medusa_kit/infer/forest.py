"""The trees of a step, one after another: what a drafter returns and a forward takes.

Shapes: B trees, N nodes with root, of all trees or of the largest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_kit.transfer import to_device
from medusa_kit.tree.draft_tree import DraftTree
from medusa_kit.tree.shape import Numbers, TreeShape, chain, shape_of

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class Forest:
    """Draft tokens of several requests, or pieces of text, tree after tree, none padded.

    `tokens_N` lies on the base model's device, where drafters that run there leave it unread.
    """

    tokens_N: Tensor
    shapes: Sequence[TreeShape]

    @classmethod
    def of(
        cls,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        device: torch.device,
    ) -> "Forest":
        """Trees with these tokens and parents, each request's root first."""
        shapes = [shape_of(tuple(tree)) for tree in parents]
        return cls(to_device([token for tree in tokens for token in tree], device), shapes)

    @classmethod
    def of_drafts(cls, trees: Sequence[DraftTree], device: torch.device) -> "Forest":
        """One tree for each request."""
        return cls.of([tree.tokens for tree in trees], [tree.parents for tree in trees], device)

    @classmethod
    def chains(cls, pieces: Sequence[Sequence[int]], device: torch.device) -> "Forest":
        """Pieces of text: trees without branches."""
        shapes = [chain(len(piece)) for piece in pieces]
        return cls(to_device([token for piece in pieces for token in piece], device), shapes)

    @classmethod
    def joined(cls, forests: Sequence["Forest"]) -> "Forest":
        """All trees of these, in order."""
        if len(forests) == 1:
            return forests[0]
        tokens_N = torch.cat([forest.tokens_N for forest in forests])
        return cls(tokens_N, [shape for forest in forests for shape in forest.shapes])

    @cached_property
    def counts(self) -> list[int]:
        """Nodes of each tree."""
        return [len(shape.parents) for shape in self.shapes]

    @cached_property
    def depths_N(self) -> Numbers:
        """The depth of each node in its tree, on the host."""
        return _one_after_another(self.shapes, _depths)

    @property
    def sees(self) -> NDArray[np.bool_]:
        """Which nodes of each tree see which, tree after tree, on the host."""
        return _one_after_another(self.shapes, _sees)

    def words(self, num_words: int) -> Numbers:
        """words_NW of each tree, tree after tree, with so many words for each node."""
        return _one_after_another(self.shapes, partial(_words, num_words=num_words))

    def token_lists(self) -> list[list[int]]:
        """The tokens of each tree, read from the device."""
        tokens, first, lists = self.tokens_N.tolist(), 0, list[list[int]]()
        for count in self.counts:
            lists.append(tokens[first : first + count])
            first += count
        return lists

    def of_trees(self, first: int, last: int) -> "Forest":
        """The trees from `first` to before `last`."""
        if last - first == len(self.shapes):
            return self
        start, end = sum(self.counts[:first]), sum(self.counts[:last])
        return Forest(self.tokens_N[start:end], self.shapes[first:last])

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens_BN, depths_BN, sees_BNN) on the device, with as many nodes in each row as the
        largest tree has; those added see themselves alone."""
        B, N, device = len(self.shapes), max(self.counts), self.tokens_N.device
        parts = [_on_device(shape, device) for shape in self.shapes]
        if min(self.counts) == N:
            depths, sees = (torch.stack(same) for same in zip(*parts, strict=True))
            return self.tokens_N.view(B, N), depths, sees
        tokens_BN, depths_BN = (self.tokens_N.new_zeros(B, N) for _ in range(2))
        sees_BNN = torch.eye(N, dtype=torch.bool, device=device).repeat(B, 1, 1)
        at = self.in_padded()
        depths_N = torch.cat([depths for depths, _ in parts])
        tokens_BN.view(-1)[at], depths_BN.view(-1)[at] = self.tokens_N, depths_N
        for row, (count, (_, sees)) in enumerate(zip(self.counts, parts, strict=True)):
            sees_BNN[row, :count, :count] = sees
        return tokens_BN, depths_BN, sees_BNN

    def in_padded(self, last_only: bool = False) -> Tensor:
        """Where each node, or each row's last one, is in the padded rows, counted through them."""
        N, at = max(self.counts), list[int]()
        for row, count in enumerate(self.counts):
            at += [row * N + node for node in range(count - 1 if last_only else 0, count)]
        return to_device(at, self.tokens_N.device)


def _one_after_another(
    shapes: Sequence[TreeShape], of_shape: Callable[[TreeShape], NDArray[T]]
) -> NDArray[T]:
    """What is of each shape, of all of them. Where all trees have one shape, as those of heads do,
    it is made at once."""
    first = shapes[0]
    if len(shapes) == 1:
        return of_shape(first)
    if all(shape is first for shape in shapes):
        return np.concatenate([of_shape(first)] * len(shapes))
    return np.concatenate([of_shape(shape) for shape in shapes])


def _depths(shape: TreeShape) -> Numbers:
    return shape.depths_N


def _sees(shape: TreeShape) -> NDArray[np.bool_]:
    return shape.sees_NN.ravel()


def _words(shape: TreeShape, num_words: int) -> Numbers:
    words_NW = shape.words_NW
    if words_NW.shape[1] == num_words:
        return words_NW
    return np.pad(words_NW, ((0, 0), (0, num_words - words_NW.shape[1])))


@lru_cache(maxsize=256)
def _on_device(shape: TreeShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """(depths_N, sees_NN) there. They are never written to."""
    depths_N, sees_NN = map(torch.from_numpy, (shape.depths_N, shape.sees_NN))
    return to_device(depths_N, device), to_device(sees_NN, device)
