"""A verifier whose forwards have an adapter on the model."""

from contextlib import ExitStack

from torch import Tensor

from medusa_kit.base.adapter_layers import AdapterLayers
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention.step import TreeStep
from medusa_kit.infer.chains.verifier import ChainVerifier
from medusa_kit.infer.outputs import Outputs, TextStates
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Forward, Verifier
from medusa_kit.locks import lock_of


class AdaptedVerifier(Verifier):
    """`plain`, with an adapter on the model during its forwards. `base`: the same model under the
    fingerprint that it has with the adapter."""

    def __init__(self, plain: Verifier, base: BaseModel, layers: AdapterLayers) -> None:
        vars(self).update(vars(plain))
        if plain.captures:  # what an adapter is added to is not captured
            self.steps_run_by = "torch"
        self._plain, self.base, self.layers = plain, base, layers
        self._watching = {}

    @property
    def plain(self) -> Verifier:
        return self._plain

    def make_room(self) -> bool:
        return self.plain.make_room()

    def _run_model(
        self,
        forward: Forward,
        cache: TreeCache,
        step: TreeStep,
        tokens_BN: Tensor,
        keep_M: Tensor | None = None,
        whole: list[TextStates] | None = None,
    ) -> Outputs:
        with ExitStack() as stack:
            stack.enter_context(lock_of(self.base))
            stack.enter_context(self.layers.added())
            return super()._run_model(forward, cache, step, tokens_BN, keep_M, whole)


class AdaptedChainVerifier(AdaptedVerifier, ChainVerifier):
    """A verifier of chains with an adapter on the model during its forwards."""


def adapted(plain: Verifier, base: BaseModel, layers: AdapterLayers) -> AdaptedVerifier:
    kind = AdaptedChainVerifier if plain.chains_only else AdaptedVerifier
    return kind(plain, base, layers)
