"""One forward of fixed shapes: its inputs in one copy, its outputs, its graph.

Nodes of all rows go through the model one after another; attention alone sees them row by row,
padded. What is left over of T repeats the first node, and is not read. The only row of a cache, or
rows of a model that needs them padded, go through it as they are.

Shapes: B rows of the cache, T nodes with those left over, N nodes of a row at most, W words of
ancestors (64 nodes each), X all numbers sent, V vocabulary, D hidden.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.attention.step import TreeStep
from medusa_kit.infer.device.cache import FixedCache, Target
from medusa_kit.infer.device.step import FixedStep
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.likeliest import likeliest
from medusa_kit.infer.outputs import NodeScores, Outputs
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Forward
from medusa_kit.transfer import to_device
from medusa_kit.tree.shape import WORD, Numbers

MAX_NODES = 512  # of all rows in one captured forward
ROW_GROWTH = 4  # a row's places are 1, 4, 16, 64, ...: attention alone is padded to them


class Shape(NamedTuple):
    """The sizes that a forward is captured for: T nodes, N of a row at most, slots in sight."""

    num_nodes: int
    row_nodes: int
    in_sight: int


def fitting(counts: Sequence[int], num_rows: int = 2) -> tuple[int, int]:
    """(T, N) for rows of so many nodes in a cache of so many: few of each, so that there are few
    shapes."""
    num_nodes, row_nodes = power_of_two(sum(counts)), 1
    if num_rows == 1:
        return num_nodes, num_nodes
    while row_nodes < max(counts):
        row_nodes *= ROW_GROWTH
    return num_nodes, row_nodes


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class Model(Protocol):
    """What runs forwards (`CapturedVerifier`)."""

    base: BaseModel
    attention: AttentionChoice

    @property
    def pads(self) -> bool: ...

    def run_step(
        self, forward: Forward, cache: TreeCache, step: TreeStep, tokens_BN: Tensor
    ) -> Outputs: ...


def fills_rows(model: Model, cache: TreeCache) -> bool:
    """Whether all rows go through the model padded, since it needs that or there is only one: then
    attention, too, gets them as they are, two or three operations fewer in each layer."""
    return model.pads or len(cache.lengths) == 1


class CapturedForward:
    """The forward of one shape over one cache. `forward`: the model's, or a compiled one.
    `num_more`: how many numbers a subclass sends besides."""

    def __init__(
        self, model: Model, cache: FixedCache, shape: Shape, forward: Forward, num_more: int = 0
    ) -> None:
        self._model, self.shape, self._forward = model, shape, forward
        self._of = weakref.ref(cache)  # which owns this forward
        self._pads = fills_rows(model, cache)
        T, N, _ = shape
        device = model.base.device
        self._tokens_T = torch.zeros(T, dtype=torch.int64, device=device)
        B, W = len(cache.lengths), -(-N // WORD)
        sizes = [B, T, T, T * W, num_more]
        self._sent_X = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._lengths_B, positions, depths, words, self._more_X = self._sent_X.split(sizes)
        self._padded_T, self._depths_T, self._words_TW = positions, depths, words.view(T, W)
        self._nodes_N = torch.arange(N, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Outputs, Tensor] | None = None  # of the captured forward; the argmax

    @property
    def _cache(self) -> FixedCache:
        cache = self._of()
        assert cache is not None, "a forward over a cache that is gone"
        return cache

    def send(self, nodes: Forest, rows: Sequence[int]) -> None:
        """Let the next run be over these nodes; the host does not wait."""
        count = len(nodes.tokens_N)
        self._tokens_T[:count].copy_(nodes.tokens_N)
        self._tokens_T[count:].copy_(nodes.tokens_N[:1].expand(self.shape.num_nodes - count))
        numbers = self._numbers(nodes, rows)
        self._sent_X.copy_(to_device(torch.from_numpy(numbers), self._sent_X.device))

    def run(self) -> None:
        """All that is captured. Nothing in it is read on the host."""
        outputs = self.scores(self._forward)
        self._outputs = outputs, likeliest(outputs.logits)

    def scores(self, forward: Forward) -> Outputs:
        """The outputs at the nodes that were sent, by this forward."""
        if self._pads:
            return self._padded(forward).each(lambda part: part.flatten(0, 1)[self._padded_T])
        N, in_sight = self.shape.row_nodes, self.shape.in_sight
        step, rows_T = self._step(), self._padded_T // N
        step.at_N, slots_T = self._padded_T, self._lengths_B[rows_T] + self._padded_T % N
        target = Target(rows_T, slots_T, in_sight)
        with self._cache.writing(target):
            outputs = self._model.run_step(forward, self._cache, step, self._tokens_T[None])
        return outputs.each(lambda part: part[0])

    def _padded(self, forward: Forward) -> Outputs:
        """The model's outputs [B, N, ...] where all rows of the cache go through it."""
        B, N = len(self._cache.lengths), self.shape.row_nodes
        tokens_X = self._nodes_N.new_zeros(B * N)
        tokens_X[self._padded_T] = self._tokens_T
        rows_X = torch.arange(B, device=tokens_X.device).repeat_interleave(N)
        slots_X = (self._lengths_B[:, None] + self._nodes_N).flatten()
        with self._cache.writing(Target(rows_X, slots_X, self.shape.in_sight)):
            return self._model.run_step(forward, self._cache, self._step(), tokens_X.view(B, N))

    def _step(self) -> FixedStep:
        """The trees of all rows, from what was sent."""
        B, N = len(self._cache.lengths), self.shape.row_nodes
        words_TN = self._words_TW[:, self._nodes_N // WORD]
        sees_XN = torch.eye(N, dtype=torch.bool, device=self._nodes_N.device).repeat(B, 1)
        sees_XN[self._padded_T] = (words_TN >> (self._nodes_N % WORD)) & 1 == 1
        depths_X = self._nodes_N.new_zeros(B * N)
        depths_X[self._padded_T] = self._depths_T
        return FixedStep(
            self._lengths_B,
            depths_X.view(B, N),
            sees_XN.view(B, N, N),
            self.shape.in_sight,
            self._model.attention.attend,
        )

    def replay(self, num_nodes: int) -> NodeScores:
        """Scores of the first `num_nodes` nodes. They are copies: the next replay of any forward
        overwrites what this one has computed."""
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        assert self._outputs is not None
        outputs, argmax_T = self._outputs
        hidden, logits, layers = outputs.each(lambda part: part[:num_nodes].clone())
        return NodeScores(hidden, logits, None, argmax_T[:num_nodes].clone(), layers)

    def _numbers(self, nodes: Forest, rows: Sequence[int]) -> Numbers:
        """The numbers that the device gets: lengths, then each node's position among the padded
        nodes, its depth and its ancestors."""
        (T, N, _), cache = self.shape, self._cache
        sent = np.empty(len(self._sent_X) - len(self._more_X), np.int64)
        B, W, at = len(cache.lengths), -(-N // WORD), np.array(rows)
        lengths_B, positions, depths = sent[:B], sent[B : B + T], sent[B + T : B + 2 * T]
        words_TW = sent[B + 2 * T :].reshape(T, W)
        lengths_B[:] = cache.lengths if self._pads else 0  # padded, all write behind what they hold
        lengths_B[at] = [cache.lengths[row] for row in rows]
        counts = np.array(nodes.counts)
        # Node j of all is node j less those of earlier trees in its row.
        earlier = (at * N - (counts.cumsum() - counts)).repeat(counts)
        M = len(earlier)
        positions[:M], depths[:M] = earlier + np.arange(M), nodes.depths_N
        words_TW[:M] = nodes.words(W)
        if M < T:
            positions[M:], depths[M:], words_TW[M:] = positions[0], depths[0], words_TW[0]
        return sent
