"""Steps of fixed shapes whose trees come from the host: guesses from text and tables.

There is one step for each of a few numbers of nodes, over one cache. Before a step the host sends
one small tensor, the trees. After it the host reads one: the emitted tokens, and what the drafter
needs to guess on (the likeliest tokens after each node, the heads' tree for the next step).

Shapes: B batch, N nodes with root, J nodes of a path, R likeliest tokens after a node, X all that
the host reads of a row, D hidden, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_kit.infer.cuda_graph.accept import Accepted, at_nodes
from medusa_kit.infer.cuda_graph.capture import GraphMemory
from medusa_kit.infer.cuda_graph.compiled import check_compiled
from medusa_kit.infer.cuda_graph.forward import StaticVerifier
from medusa_kit.infer.cuda_graph.replay import ReplayedStep
from medusa_kit.infer.cuda_graph.step import GRAPH_BYTES, Outcome, StaticDrafter, StepRows
from medusa_kit.infer.draft import ROOT
from medusa_kit.infer.verifier import Forward
from medusa_kit.no_gradients import no_gradients

MOST_NODES = 62  # which nodes a node sees is sent as the bits of one number
TOKEN, PARENT, DEPTH, SEES = range(4)  # what is sent of each node
NO_NODE = -1  # the parent of the root, and of a place without a node


@dataclass(frozen=True)
class HostTreeSpec:
    """What a drafter needs of such steps: the numbers of nodes (ascending), how many of the
    likeliest tokens after each node, and whose heads' guesses."""

    sizes: tuple[int, ...]
    ranks: int = 0
    heads: StaticDrafter | None = None

    @property
    def num_nodes(self) -> int:
        return self.sizes[-1]

    @property
    def num_guesses(self) -> int:
        return 0 if self.heads is None else len(self.heads.topology.parents)

    def fitting(self, num_nodes: int) -> int:
        """The smallest size that holds so many nodes."""
        return next(size for size in self.sizes if size >= num_nodes)

    def alike(self, other: object) -> bool:
        """Whether steps made for one can be used for the other."""
        if not isinstance(other, HostTreeSpec) or (self.sizes, self.ranks) != (
            other.sizes,
            other.ranks,
        ):
            return False
        ours, theirs = self.heads, other.heads
        if ours is None or theirs is None:
            return ours is theirs
        return ours.alike(theirs)


class Tree(NamedTuple):
    """A row's tree on the host; a parent comes before its children."""

    tokens: Sequence[int]
    parents: Sequence[int]


def packed(tree: Tree, num_nodes: int) -> list[list[int]]:
    """Tokens, parents, depths and ancestors of a tree, padded to `num_nodes`. A padding node has no
    parent, so that it is never accepted, and sees only itself."""
    rest = range(len(tree.tokens), num_nodes)
    depths, sees = list[int](), list[int]()
    for node, parent in enumerate(tree.parents):
        inside = parent >= 0
        depths.append(depths[parent] + 1 if inside else 0)
        sees.append((sees[parent] if inside else 0) | 1 << node)
    return [
        [*tree.tokens, *(tree.tokens[0] for _ in rest)],
        [*(max(parent, NO_NODE) for parent in tree.parents), *(NO_NODE for _ in rest)],
        [*depths, *(0 for _ in rest)],
        [*sees, *(1 << node for node in rest)],
    ]


class HostTreeSize(ReplayedStep):
    """The step of N nodes: its buffers and, on CUDA, its graph."""

    def __init__(self, steps: "HostTreeStep", num_nodes: int, forward: Forward | None) -> None:
        self.num_nodes, self.forward = num_nodes, forward
        self.verifier, self.cache, self.spec = steps.verifier, steps.cache, steps.drafter
        self.batch_size, self.num_slots = steps.batch_size, steps.num_slots
        self.lengths_B, self.active_B = steps.lengths_B, steps.active_B
        self.tolerance_1 = steps.tolerance_1
        first = packed(Tree([0], [ROOT]), num_nodes)
        self.staged_B4N = torch.tensor([first] * self.batch_size)
        if steps.device.type == "cuda" and torch.cuda.is_initialized():  # else copying would wait
            self.staged_B4N = self.staged_B4N.pin_memory()
        self.sent_B4N = self.staged_B4N.to(steps.device)
        self.nodes_N = torch.arange(num_nodes, device=steps.device)
        read = num_nodes + 2 + num_nodes * self.spec.ranks + self.spec.num_guesses
        self.out_BX = self.sent_B4N.new_zeros(self.batch_size, read)

    def run(self, trees: Mapping[int, Tree]) -> list[list[int]]:
        for row, tree in trees.items():
            self.staged_B4N[row] = torch.tensor(packed(tree, self.num_nodes))
        self.sent_B4N.copy_(self.staged_B4N, non_blocking=True)
        return self.replay()

    def advance(self) -> None:
        hidden_BND, logits_BNV, found = self.verify()
        best, spec = logits_BNV.topk(max(self.spec.ranks, 2), dim=-1), self.spec
        near_ties_B1 = self.near_ties(at_nodes(best.values[..., :2], found.nodes_BJ), found)
        results = [found.emitted_BJ, found.counts_B[:, None], near_ties_B1]
        if spec.ranks:
            results.append(best.indices[..., : spec.ranks].flatten(1))
        if spec.heads is not None:
            hidden_BD = found.last_hidden(hidden_BND)
            results.append(spec.heads.fill(hidden_BD, found.roots_B, on_device=True))
        self.out_BX.copy_(torch.cat(results, dim=1))

    def nodes(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.sent_B4N[:, TOKEN], self.sent_B4N[:, DEPTH], self._sees_BNN()

    def accept(self, likeliest_BN: Tensor, max_depth_B: Tensor) -> Accepted:
        return accept_host_trees(self.sent_B4N, self._sees_BNN(), likeliest_BN, max_depth_B)

    def _sees_BNN(self) -> Tensor:
        return (self.sent_B4N[:, SEES, :, None] >> self.nodes_N) & 1 == 1


class HostTreeStep(StepRows):
    """Steps for B rows over S slots whose trees come from the host; kept and lent like a GraphStep.

    `compiled`: makes a compiled forward, one for each size. Raises torch.OutOfMemoryError, and
    RuntimeError where a step cannot be captured.
    """

    @no_gradients
    def __init__(
        self,
        verifier: StaticVerifier,
        spec: HostTreeSpec,
        batch_size: int,
        num_slots: int,
        compiled: Callable[[], Forward] | None = None,
        graphs: GraphMemory | None = None,
    ) -> None:
        self.verifier, self.drafter, self.device = verifier, spec, verifier.base.device
        self.batch_size, self.num_slots, self.busy = batch_size, num_slots, False
        self.cache = verifier.new_cache(batch_size, num_slots)
        self.lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        self.active_B = torch.zeros(batch_size, dtype=torch.bool, device=self.device)
        self.tolerance_1 = torch.zeros(1, device=self.device)
        self.rounding_tolerance = 0.0
        self.sizes: dict[int, HostTreeSize] = {}
        try:
            self._prepare(compiled, graphs)
        except BaseException:
            self.free()
            raise

    def _prepare(self, compiled: Callable[[], Forward] | None, graphs: GraphMemory | None) -> None:
        for num_nodes in self.drafter.sizes:
            size = HostTreeSize(self, num_nodes, compiled() if compiled else None)
            if size.forward is not None:
                self.rounding_tolerance = max(self.rounding_tolerance, check_compiled(size))
            size.advance()  # the first forward allocates the slots
            self.sizes[num_nodes] = size
        for size in self.sizes.values():
            size.capture(graphs)

    @no_gradients
    def run(self, trees: Mapping[int, Tree]) -> dict[int, Outcome]:
        """One step over `trees`, given by row, in the smallest size that holds them all."""
        N = self.drafter.fitting(max(len(tree.tokens) for tree in trees.values()))
        results, R = self.sizes[N].run(trees), self.drafter.ranks
        outcomes = {}
        for row in trees:
            read, guesses_at = results[row], N + 2 + N * R
            ranked = [read[start : start + R] for start in range(N + 2, guesses_at, R)] if R else []
            emitted, near_ties = read[: read[N]], read[N + 1]
            outcomes[row] = Outcome(emitted, near_ties, N, ranked, read[guesses_at:])
        return outcomes

    @property
    def num_bytes(self) -> int:
        """What it holds while it is not in use."""
        graphs = sum(size.graph is not None for size in self.sizes.values())
        return self.cache.num_bytes + graphs * GRAPH_BYTES

    def free(self) -> None:
        """Free the memory now; the step cannot be used any more."""
        self.sizes.clear()
        self.cache.free()


def accept_host_trees(
    sent_B4N: Tensor, sees_BNN: Tensor, likeliest_BN: Tensor, max_depth_B: Tensor
) -> Accepted:
    """As `accept_greedy`, where each row has a tree of its own."""
    tokens_BN, parents_BN, depths_BN, _ = sent_B4N.unbind(1)
    N = tokens_BN.shape[1]
    places_J = torch.arange(N, device=tokens_BN.device)
    named_BN = likeliest_BN.gather(1, parents_BN.clamp_min(0))
    holds_BN = ((tokens_BN == named_BN) & (parents_BN >= 0)) | (places_J == 0)
    path_holds_BN = (holds_BN[:, None] | ~sees_BNN).all(-1)
    fits_BN = path_holds_BN & (depths_BN <= max_depth_B[:, None])
    last_B = torch.where(fits_BN, depths_BN, -1).argmax(1)
    depth_B1 = depths_BN.gather(1, last_B[:, None])
    on_path_BN = sees_BNN.gather(1, last_B[:, None, None].expand(-1, 1, N))[:, 0]
    at_BJN = on_path_BN[:, None] & (depths_BN[:, None] == places_J[:, None])
    nodes_BJ = torch.where(places_J <= depth_B1, at_BJN.int().argmax(-1), places_J)
    roots_B1 = likeliest_BN.gather(1, last_B[:, None])
    next_BJ = tokens_BN.gather(1, nodes_BJ).roll(-1, dims=1)
    emitted_BJ = torch.where(places_J == depth_B1, roots_B1, next_BJ)
    return Accepted(last_B, nodes_BJ, depth_B1[:, 0] + 1, roots_B1[:, 0], emitted_BJ)
