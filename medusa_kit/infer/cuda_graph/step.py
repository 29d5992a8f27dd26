"""A whole step of fixed shapes: verify, accept, commit and draft the next tree, on the device.

The host reads one small tensor per step: the emitted tokens and their count. On CUDA the step is
recorded once in a CUDA graph and replayed. Elsewhere the same function is called.

Shapes: B batch, N nodes with root, D hidden, X all that the host reads of a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from medusa_kit.infer.cuda_graph.accept import Accepted, TreeTables, accept_greedy, at_nodes, walked
from medusa_kit.infer.cuda_graph.cache import StaticTreeCache
from medusa_kit.infer.cuda_graph.capture import GraphMemory
from medusa_kit.infer.cuda_graph.compiled import check_compiled
from medusa_kit.infer.cuda_graph.forward import StaticVerifier
from medusa_kit.infer.cuda_graph.replay import ReplayedStep
from medusa_kit.infer.draft import Topology
from medusa_kit.infer.transfer import to_device
from medusa_kit.infer.verifier import Forward
from medusa_kit.no_gradients import no_gradients

GRAPH_BYTES = 32 << 20  # of a graph of a thousand kernels, roughly


class StaticDrafter(Protocol):
    """A drafter with one topology, whose tokens follow from hidden state and root."""

    topology: Topology

    def alike(self, other: object) -> bool:
        """Whether steps made for one can be used for the other."""
        ...

    def fill(self, hidden_BD: Tensor, roots_B: Tensor, on_device: bool = False) -> Tensor: ...


class Outcome(NamedTuple):
    """The result of a step in one row. `emitted`: accepted tokens, then the next root. What follows
    `num_nodes`, the row's nodes, is there where trees come from the host."""

    emitted: list[int]
    near_ties: int  # among them
    num_nodes: int
    ranked_NR: Sequence[list[int]] = ()
    guesses: Sequence[int] = ()  # tokens of the heads' tree for the next step, root included


class StepRows:
    """The lengths of a step's rows and which are active; subclasses add what else moves along."""

    cache: StaticTreeCache
    lengths_B: Tensor
    active_B: Tensor  # rows that are decoded; the others idle
    tolerance_1: Tensor

    @no_gradients
    def join(self, rows: Sequence[int], lengths: Sequence[int], tolerance: float = 0.0) -> None:
        """Let these rows, which hold so many tokens in the cache, be decoded from the next step on.
        `tolerance`: a smaller margin between the likeliest tokens is a near-tie."""
        device = self.lengths_B.device
        rows_X, lengths_X = to_device([rows, lengths], device).unbind(0)
        self.lengths_B[rows_X] = lengths_X
        self.active_B.index_fill_(0, rows_X, True)
        self.tolerance_1.fill_(tolerance)

    @no_gradients
    def rest(self, row: int) -> None:
        """Let `row`, which has finished, idle in its place from the next step on."""
        self.active_B[row] = False

    @no_gradients
    def take_over(self, other: Any, places: Sequence[int]) -> None:
        """Continue in the first rows here what is in these places of `other`, a step of the same
        kind."""
        self.cache.copy_rows(other.cache, places)
        self.active_B.zero_()
        self.active_B[: len(places)] = True
        for row, place in enumerate(places):
            self.lengths_B[row] = other.lengths_B[place]
        self.tolerance_1.copy_(other.tolerance_1)


class GraphStep(StepRows, ReplayedStep):
    """Steps for B rows and one tree, over S slots. Rows `join`, have a first `draft`, then `run`.

    With `graphs` it is captured: the graph holds the addresses of the weights too, so weights that
    are replaced later are not seen. Raises torch.OutOfMemoryError, and RuntimeError where the step
    cannot be captured.
    """

    @no_gradients
    def __init__(
        self,
        verifier: StaticVerifier,
        drafter: StaticDrafter,
        batch_size: int,
        num_slots: int,
        compiled: Forward | None = None,
        graphs: GraphMemory | None = None,
    ) -> None:
        self.verifier, self.drafter = verifier, drafter
        self.batch_size, self.num_slots = batch_size, num_slots
        self.forward = compiled
        self.busy = False
        self.device = verifier.base.device
        self.tree = TreeTables.of(drafter.topology)
        self.cache = verifier.new_cache(batch_size, num_slots)
        B, N = batch_size, len(drafter.topology.parents)
        self.depths_BN = self.tree.depths_N.expand(B, N).contiguous()
        self.sees_BNN = self.tree.sees_NN.expand(B, N, N).contiguous()
        tokens_N = torch.arange(N, device=self.device) % verifier.base.info.vocab_size
        self.tokens_BN = tokens_N.repeat(B, 1)
        self.lengths_B = tokens_N.new_zeros(B)
        self.active_B = tokens_N.new_zeros(B, dtype=torch.bool)
        self.tolerance_1 = torch.zeros(1, device=self.device)
        self.num_nodes = N
        self.out_BX = tokens_N.new_zeros(B, self.tree.longest + 2)
        self.rounding_tolerance = 0.0  # how far the compiled forward's logits may be off
        try:
            self._prepare(graphs)
        except BaseException:
            self.free()
            raise

    def _prepare(self, graphs: GraphMemory | None) -> None:
        if self.forward is not None:
            self.rounding_tolerance = check_compiled(self)
        self.advance()  # the first forward allocates the slots
        self.capture(graphs)

    @no_gradients
    def draft(self, rows: Sequence[int], roots: Sequence[int], hidden_XD: Tensor) -> None:
        """The first tree of rows that join, after their prompts."""
        rows_X, roots_X = to_device([rows, roots], self.device).unbind(0)
        self.tokens_BN[rows_X] = self.drafter.fill(hidden_XD, roots_X)

    @no_gradients
    def run(self) -> list[Outcome]:
        """One step: what came of each row; of no meaning for those that idle."""
        results = self.replay()
        return [Outcome(walked(row[:-1]), row[-1], self.num_nodes) for row in results]

    @no_gradients
    def take_over(self, other: Any, places: Sequence[int]) -> None:
        super().take_over(other, places)
        for row, place in enumerate(places):
            self.tokens_BN[row] = other.tokens_BN[place]

    @property
    def num_bytes(self) -> int:
        """What it holds while it is not in use."""
        return self.cache.num_bytes + (0 if self.graph is None else GRAPH_BYTES)

    def free(self) -> None:
        """Free the memory now; the step cannot be used any more. Cache and layers refer to each
        other, so without this it would take a garbage collection."""
        self.graph = None
        self.cache.free()

    def advance(self) -> None:
        hidden_BND, logits_BNV, found = self.verify()
        hidden_BD = found.last_hidden(hidden_BND)
        self.tokens_BN.copy_(self.drafter.fill(hidden_BD, found.roots_B, on_device=True))
        best_BJ2 = at_nodes(logits_BNV, found.nodes_BJ).topk(2, dim=-1).values
        results = [found.emitted_BJ, found.counts_B[:, None], self.near_ties(best_BJ2, found)]
        self.out_BX.copy_(torch.cat(results, dim=1))

    def nodes(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.tokens_BN, self.depths_BN, self.sees_BNN

    def accept(self, likeliest_BN: Tensor, max_depth_B: Tensor) -> Accepted:
        return accept_greedy(self.tree, self.tokens_BN, likeliest_BN, max_depth_B)
