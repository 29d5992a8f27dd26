"""A verifier whose steps run in C++, and what does not fit there through torch.

Shapes: B batch, N nodes with root, M of them kept.
"""

from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.cpu.decoder import NativeDecoder
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.tree_step import NodeScores, TreeStep
from medusa_kit.infer.verifier import Verifier
from medusa_kit.locks import lock_of


class NativeVerifier(Verifier):
    """The C++ decoder takes few rows over a cache of one shape, the model all others."""

    def __init__(
        self, base: BaseModel, native: NativeDecoder, attention: AttentionChoice | str = "auto"
    ) -> None:
        super().__init__(base, attention, f"C++ ({native.summary})")
        self.native = native

    def prompt_chunk(self, num_rows: int) -> int:
        return self.native.prompt_chunk(num_rows) or super().prompt_chunk(num_rows)

    def _scores(
        self,
        cache: TreeCache,
        step: TreeStep,
        tokens_BN: Tensor,
        keep_M: Tensor | None,
        prompt: bool,
    ) -> NodeScores:
        if not self.native.takes(cache, step):
            return super()._scores(cache, step, tokens_BN, keep_M, prompt)
        positions_BN = self._positions(step)
        with lock_of(self.base.model):
            return self.native.forward(cache, tokens_BN, positions_BN, step, keep_M, prompt)
