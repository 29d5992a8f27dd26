"""Batches of one model under different verifiers, used as one batch: they take turns.

A forward has one adapter. So rows of one adapter form a batch of their own, with a cache of its
own. Each step is that of the batch that has waited longest, whatever their numbers of rows.
"""

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

from medusa_kit.base.adapter_layers import AdapterLayers
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.batch import Batch
from medusa_kit.infer.chains.verifier import ChainVerifier
from medusa_kit.infer.draft import Drafter
from medusa_kit.infer.request import Emitted, Request
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.tree_step import TreeStep
from medusa_kit.infer.verifier import Forward, Verifier
from medusa_kit.locks import lock_of
from medusa_kit.no_gradients import no_gradients


class AdaptedVerifier(Verifier):
    """`plain`, with an adapter on the model during its forwards. `base`: the same model under the
    fingerprint that it has with the adapter."""

    def __init__(self, plain: Verifier, base: BaseModel, layers: AdapterLayers) -> None:
        vars(self).update(vars(plain))
        if plain.captures:  # what an adapter is added to is not captured
            self.steps_run_by = "torch"
        self.plain, self.base, self.layers = plain, base, layers
        self._watching = {}

    def make_room(self) -> bool:
        return self.plain.make_room()

    def _run_model(
        self,
        forward: Forward,
        cache: TreeCache,
        step: TreeStep,
        tokens_BN: Tensor,
        keep_M: Tensor | None = None,
        whole: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        with ExitStack() as stack:
            stack.enter_context(lock_of(self.base))
            stack.enter_context(self.layers.added())
            return super()._run_model(forward, cache, step, tokens_BN, keep_M, whole)


class AdaptedChainVerifier(AdaptedVerifier, ChainVerifier):
    """The same around a verifier of chains."""


def adapted(plain: Verifier, base: BaseModel, layers: AdapterLayers) -> AdaptedVerifier:
    kind = AdaptedChainVerifier if plain.chains_only else AdaptedVerifier
    return kind(plain, base, layers)


class Turns:
    """What a batch is to the thread that owns it, over a batch for each row's verifier. `make`: a
    batch for one; that of `verifier` is kept while it has no rows, the others are not."""

    def __init__(self, make: Callable[[Verifier], Batch], verifier: Verifier) -> None:
        self._make, self._first = make, make(verifier)
        self._batches = {verifier: self._first}  # the one that has waited longest first
        self.finished: list[Request] = []
        self.num_steps = self.num_nodes = 0

    @property
    def verifier(self) -> Verifier:
        return self._first.verifier

    @property
    def max_rows(self) -> int:
        """Of each of the batches."""
        return self._first.max_rows

    @property
    def cached_tokens(self) -> list[int]:
        return [count for batch in self._batches.values() for count in batch.cached_tokens]

    @property
    def num_reading(self) -> int:
        return sum(batch.num_reading for batch in self._batches.values())

    @property
    def num_running(self) -> int:
        return sum(batch.num_running for batch in self._batches.values())

    def add(self, row: Request, drafter: Drafter) -> None:
        """Let a row in, to be decoded by the verifier that it was made for. It watches what the
        first one does, which costs little, where its drafter wants nothing else."""
        verifier = row.verifier or self.verifier
        verifier = verifier.with_watched(drafter.watches or self.verifier.watched)
        batch = self._batches.get(verifier)
        if batch is None:
            batch = self._batches[verifier] = self._make(verifier)
        batch.add(row, drafter)

    def cancel(self, row: Request) -> None:
        self._first.cancel(row)

    def fail(self, error: Exception) -> None:
        """End every row here, since `error` was none of a row's or a drafter's."""
        for batch in self._batches.values():
            batch.fail(error)

    @no_gradients
    def step(self) -> Emitted:
        self.finished = []
        self.remove_finished()
        for verifier, batch in list(self._batches.items()):
            if not batch.num_rows:
                continue
            self._batches[verifier] = self._batches.pop(verifier)
            before = batch.num_steps
            emitted = batch.step()
            self.num_steps += batch.num_steps - before
            self.num_nodes = batch.num_nodes
            return emitted
        return []

    def remove_finished(self) -> None:
        for verifier, batch in list(self._batches.items()):
            batch.remove_finished()
            self.finished += batch.finished
            batch.finished = []
            if batch is not self._first and not batch.num_rows:
                del self._batches[verifier]
