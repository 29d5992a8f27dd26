"""What a request keeps of its tree: its rule applied to the base model's output at each node.

Shapes: N nodes with root, D hidden, V vocabulary, R likeliest tokens, X outputs of watched layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from medusa_kit.infer.decode.accept.rules import Verdict, accept, accept_typical
from medusa_kit.infer.decode.accept.sampler import Sampler, has_scores
from medusa_kit.infer.likeliest import NO_TOKEN, no_scores
from medusa_kit.tree.shape import path_to


@dataclass(frozen=True)
class ScoredTree:
    """One request's tree as the base model scored it; logits are processed only where a rule asks.

    All but hidden states and logits has been read from the device. `committed`: prompt and
    committed tokens. `argmax`: where it is at hand, NO_TOKEN where logits are no numbers;
    `near_ties`: where some request of the step needs them. `named`:
    the token after each node by the request's own rule; None where each is chosen when it is
    reached.
    """

    sampler: Sampler
    committed: list[int]
    tokens: list[int]
    hidden_ND: Tensor
    logits_NV: Tensor
    ranked_NR: Tensor | None
    argmax: list[int] | None
    near_ties: list[int] | None
    named: list[int] | None
    layers_NX: Tensor | None  # outputs of watched layers

    def accept(self, parents: Sequence[int], max_depth: int) -> tuple[list[int], int]:
        """(accepted nodes without the root, the token that follows the last one). Raises
        NotFiniteError where no token can follow the root."""
        if not self.has_scores(0):
            raise no_scores(len(self.committed) + 1)

        def prefix(node: int) -> list[int]:
            return [*self.committed, *(self.tokens[n] for n in path_to(node, parents))]

        def choose(node: int) -> int:
            return self.sampler.choose(self.logits_NV[node], prefix(node))

        def judge(node: int, guesses: list[int]) -> Verdict:
            return self.sampler.judge(self.logits_NV[node], prefix(node), guesses)

        if self.sampler.params.lossy:
            return accept_typical(self.tokens, parents, judge, max_depth, self.has_scores)
        named = choose if self.named is None else self.named.__getitem__
        return accept(self.tokens, parents, named, max_depth, self.has_scores)

    def has_scores(self, node: int) -> bool:
        """Whether a token can follow the node: its logits are numbers."""
        if self.argmax is not None:
            return self.argmax[node] != NO_TOKEN
        return has_scores(self.logits_NV[node])
