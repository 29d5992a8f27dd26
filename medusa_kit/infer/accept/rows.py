"""What a row keeps of its tree: its rule applied to what the base model said at each node.

Shapes: N nodes with root, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from medusa_kit.infer.accept.rules import Verdict, accept, accept_typical
from medusa_kit.infer.accept.sampler import Sampler
from medusa_kit.infer.draft import path_to


@dataclass(frozen=True)
class ScoredTree:
    """One row's tree as the base model scored it; logits are processed only where a rule asks.

    `committed`: prompt and committed tokens. `named`: the token after each node by the row's
    own rule, where that is known.
    """

    sampler: Sampler
    committed: list[int]
    tokens: list[int]
    parents: Sequence[int]
    logits_NV: Tensor
    named: list[int] | None

    def accept(self, max_depth: int) -> tuple[list[int], int]:
        """(accepted nodes without the root, the token that follows the last one)."""
        if self.sampler.params.lossy:
            return accept_typical(self.tokens, self.parents, self._judge, max_depth)
        choose = self._choose if self.named is None else self.named.__getitem__
        return accept(self.tokens, self.parents, choose, max_depth)

    def _prefix(self, node: int) -> list[int]:
        """Everything up to `node`: prompt, committed tokens, its path."""
        return [*self.committed, *(self.tokens[n] for n in path_to(node, self.parents))]

    def _choose(self, node: int) -> int:
        return self.sampler.choose(self.logits_NV[node], self._prefix(node))

    def _judge(self, node: int, guesses: list[int]) -> Verdict:
        return self.sampler.judge(self.logits_NV[node], self._prefix(node), guesses)
