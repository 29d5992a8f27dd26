"""A request's tree with the base model's scores, and what the request keeps of it.

Shapes: N nodes with root, D hidden, V vocabulary, R likeliest tokens, X outputs of watched layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from medusa_kit.infer.decode.accept.rules import Verdict, accept, accept_typical
from medusa_kit.infer.decode.accept.sampler import Sampler, has_scores
from medusa_kit.infer.likeliest import NO_TOKEN, likeliest, no_scores
from medusa_kit.transfer import to_device
from medusa_kit.tree.shape import path_to


@dataclass(eq=False)
class ScoredTree:
    """One request's tree as the base model scored it; logits are processed only where a rule asks.

    All but what are tensors has been read from the device. `argmax`: where it is at hand, NO_TOKEN
    where logits are no numbers; `near_ties`: where some request of the step needs them. `named`:
    the token after each node by the request's own rule; None where each is chosen when it is
    reached. `path` and `next_root`: what `accept` has found.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    hidden_ND: Tensor
    logits_NV: Tensor
    layers_NX: Tensor | None = None  # outputs of watched layers, one after another
    ranked_NR: Tensor | None = None  # the likeliest tokens, where they are known
    argmax: Sequence[int] | None = None
    near_ties: Sequence[int] | None = None
    named: Sequence[int] | None = None
    path: list[int] = field(default_factory=list)  # accepted nodes, the root not included
    next_root: int = NO_TOKEN  # the token after the last accepted node

    def accept(self, sampler: Sampler, committed: list[int], max_depth: int) -> None:
        """Find `path` and `next_root`. `committed`: prompt and committed tokens. Raises
        NotFiniteError where no token can follow the root."""
        if not self.has_scores(0):
            raise no_scores(len(committed) + 1)
        tokens, parents = self.tokens, self.parents

        def prefix(node: int) -> list[int]:
            return [*committed, *(tokens[n] for n in path_to(node, parents))]

        def choose(node: int) -> int:
            return sampler.choose(self.logits_NV[node], prefix(node))

        def judge(node: int, guesses: list[int]) -> Verdict:
            return sampler.judge(self.logits_NV[node], prefix(node), guesses)

        if sampler.params.lossy:
            found = accept_typical(tokens, parents, judge, max_depth, self.has_scores)
        else:
            named = choose if self.named is None else self.named.__getitem__
            found = accept(tokens, parents, named, max_depth, self.has_scores)
        self.path, self.next_root = found

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
