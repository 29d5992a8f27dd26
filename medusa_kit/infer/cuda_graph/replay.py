"""A step over a fixed number of nodes: a function on the device, replayed if it was captured.

Shapes: B batch, N nodes with root, D hidden, V vocabulary, X all that the host reads of a row.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from medusa_kit.infer.cuda_graph.accept import Accepted
from medusa_kit.infer.cuda_graph.cache import StaticTreeCache
from medusa_kit.infer.cuda_graph.capture import GraphMemory
from medusa_kit.infer.cuda_graph.forward import StaticVerifier
from medusa_kit.infer.verifier import Forward


class ReplayedStep(ABC):
    """All that it reads and writes is in buffers that stay where they are in memory, since a graph
    holds their addresses. `forward`: a compiled forward, if it has one."""

    verifier: StaticVerifier
    cache: StaticTreeCache
    forward: Forward | None
    batch_size: int
    num_slots: int
    num_nodes: int
    lengths_B: Tensor
    active_B: Tensor  # rows that have not finished
    tolerance_1: Tensor  # a smaller margin between the likeliest tokens is a near-tie
    out_BX: Tensor  # what the host reads after a step
    graph: torch.cuda.CUDAGraph | None = None

    @abstractmethod
    def nodes(self) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens_BN, depths_BN, sees_BNN) of the trees."""

    @abstractmethod
    def accept(self, likeliest_BN: Tensor, max_depth_B: Tensor) -> Accepted: ...

    @abstractmethod
    def advance(self) -> None:
        """The function that is captured: it must not read anything on the host."""

    def capture(self, graphs: GraphMemory | None) -> None:
        """Record `advance`, given where. All rows must idle, so that running it changes nothing."""
        if graphs is not None:
            self.graph = graphs.capture(self.advance)

    def replay(self) -> list[list[int]]:
        """Run one step; returns what the host reads of each row."""
        if self.graph is None:
            self.advance()
        else:
            self.graph.replay()
        return self.out_BX.tolist()

    def verify(self) -> tuple[Tensor, Tensor, Accepted]:
        """Score the trees, accept and commit: (hidden_BND, logits_BNV, what was accepted).

        Idle rows have length 0 here, so that whatever they write stays within the slots.
        """
        lengths_B = torch.where(self.active_B, self.lengths_B, 0)
        hidden_BND, logits_BNV = self.score(lengths_B, self.forward)
        last_position = self.verifier.base.info.context_length - 1
        found = self.accept(logits_BNV.argmax(-1), last_position - lengths_B)
        self.cache.move(lengths_B, found.nodes_BJ)
        self.lengths_B.copy_(lengths_B + found.counts_B)
        return hidden_BND, logits_BNV, found

    def near_ties(self, best_BJ2: Tensor, found: Accepted) -> Tensor:
        """How many of the tokens that each row emits are near-ties [B, 1]. `best_BJ2`: logits of
        the likeliest two after each node of `found.nodes_BJ`."""
        places_J = torch.arange(best_BJ2.shape[1], device=best_BJ2.device)
        close_BJ = best_BJ2[..., 0] - best_BJ2[..., 1] < self.tolerance_1
        return (close_BJ & (places_J < found.counts_B[:, None])).sum(1, keepdim=True)

    def score(self, lengths_B: Tensor, forward: Forward | None = None) -> tuple[Tensor, Tensor]:
        """(hidden_BND, logits_BNV) of the trees after `lengths_B` tokens."""
        return self.verifier.score(self.cache, lengths_B, *self.nodes(), forward)
