"""A request's tree with the base model's scores, and what the request keeps of it.

Shapes: N nodes with root, D hidden, V vocabulary, R likeliest tokens, X outputs of watched layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from medusa_kit.infer.decode.accept.rules import Verdict, accept, accept_typical
from medusa_kit.infer.decode.accept.sampler import Sampler, has_scores
from medusa_kit.infer.likeliest import NO_TOKEN, likeliest, no_scores
from medusa_kit.infer.outputs import NodeScores
from medusa_kit.transfer import to_device
from medusa_kit.tree.shape import path_to, shape_of


@dataclass(eq=False)
class ScoredTree:
    """One request's tree as the base model scored it; logits are processed only where a rule asks.

    `scores`: of all nodes of the step, among which this tree's begin at `first`. Its part of a
    tensor is taken when it is asked for, since few are. All but what are tensors has been read from
    the device. `argmax`: where it is at hand, NO_TOKEN where logits are no numbers; `near_ties`:
    where some request of the step needs them. `named`: the token after each node by the request's
    own rule; None where each is chosen when it is reached. `path` and `next_root`: what `accept`
    has found.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    scores: NodeScores
    first: int = 0
    argmax: Sequence[int] | None = None
    near_ties: Sequence[int] | None = None
    named: Sequence[int] | None = None
    path: list[int] = field(default_factory=list)  # accepted nodes, the root not included
    next_root: int = NO_TOKEN  # the token after the last accepted node

    @property
    def hidden_ND(self) -> Tensor:
        return self._own(self.scores.hidden_ND)

    @property
    def logits_NV(self) -> Tensor:
        return self._own(self.scores.logits_NV)

    @property
    def layers_NX(self) -> Tensor | None:
        """Outputs of watched layers, one after another."""
        return None if (all_NX := self.scores.layers_NX) is None else self._own(all_NX)

    @property
    def ranked_NR(self) -> Tensor | None:
        """The likeliest tokens, where they are known."""
        return None if (all_NR := self.scores.ranked_NR) is None else self._own(all_NR)

    def _own(self, part: Tensor) -> Tensor:
        count = len(self.parents)
        return part if len(part) == count else part[self.first : self.first + count]

    def accept(self, sampler: Sampler, committed: list[int], max_depth: int) -> None:
        """Find `path` and `next_root`. `committed`: prompt and committed tokens. Raises
        NotFiniteError where no token can follow the root."""
        if not self.has_scores(0):
            raise no_scores(len(committed) + 1)
        tokens, parents = self.tokens, self.parents
        if sampler.params.lossy:
            judge = partial(self._judge, sampler, committed)
            found = accept_typical(tokens, parents, judge, max_depth, self.has_scores)
        else:
            named = self._naming(sampler, committed)
            found = accept(tokens, parents, named, max_depth, self.has_scores)
        self.path, self.next_root = found

    def _naming(self, sampler: Sampler, committed: list[int]) -> Callable[[int], int]:
        """What names the token after a node."""
        if self.named is not None:
            return self.named.__getitem__
        logits_NV = self.logits_NV
        if sampler.draws_by_position(logits_NV):
            first, depths = len(committed) + 1, shape_of(tuple(self.parents)).depths_N
            return lambda node: sampler.drawn_at(logits_NV[node], first + int(depths[node]))
        return lambda node: sampler.choose(logits_NV[node], self._prefix(committed, node))

    def _judge(
        self, sampler: Sampler, committed: list[int], node: int, guesses: list[int]
    ) -> Verdict:
        return sampler.judge(self.logits_NV[node], self._prefix(committed, node), guesses)

    def _prefix(self, committed: list[int], node: int) -> list[int]:
        """The text up to a node."""
        return [*committed, *(self.tokens[n] for n in path_to(node, self.parents))]

    def has_scores(self, node: int) -> bool:
        """Whether a token can follow the node: its logits are numbers."""
        if self.argmax is not None:
            return self.argmax[node] != NO_TOKEN
        return has_scores(self.logits_NV[node])

    def argmax_after(self, nodes: Sequence[int]) -> list[int]:
        """The argmax of the base model's logits after each of these nodes, without processing, or
        NO_TOKEN."""
        if self.argmax is not None:
            return [self.argmax[node] for node in nodes]
        nodes_M = to_device(nodes, self.logits_NV.device)
        return likeliest(self.logits_NV[nodes_M]).tolist()
