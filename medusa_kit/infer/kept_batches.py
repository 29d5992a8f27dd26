"""Batches that wait for their next request, with what their rows hold: prefixes are read once.

A request takes a batch for itself and gives it back at its end; other threads take others. What is
kept is bounded in bytes, and the batch that was used longest ago goes first.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from medusa_kit.infer.cuda_graph.runner import GraphRunner
from medusa_kit.infer.decode import Batch
from medusa_kit.infer.memory import cache_bytes_per_token
from medusa_kit.infer.prefixes import common_length, weights_version
from medusa_kit.infer.verifier import Verifier
from medusa_kit.locks import SharedLock

KEPT_BYTES = 1 << 30
GROWTH = 1.25  # more slots than asked for, since a conversation will soon ask for more


class KeptBatches:
    """The batches of one base model. `most_bytes`: of keys and values in batches that wait."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self.most_bytes = most_bytes
        self._idle: list[Batch] = []  # the one used last comes last
        self._lock = SharedLock()

    @contextmanager
    def borrowed(
        self,
        verifier: Verifier,
        prompts: Sequence[Sequence[int]],
        max_rows: int,
        num_slots: int,
        graphs: GraphRunner | None = None,
    ) -> Iterator[Batch]:
        """A batch for at most `max_rows` rows at once; the one that holds most of the prompts."""
        batch = self._take(verifier, prompts, max_rows, num_slots)
        if batch is None:
            batch = Batch(verifier, max_rows, num_slots, graphs=graphs)
        batch.use(max_rows)
        try:
            yield batch
        except GeneratorExit:  # an answer was not read to its end; that is between two steps
            self._give_back(batch)
            raise
        except torch.OutOfMemoryError:
            self.forget()
            raise
        self._give_back(batch)

    def forget(self) -> None:
        """Drop the batches that wait."""
        with self._lock:
            self._idle.clear()

    def _take(
        self, verifier: Verifier, prompts: Sequence[Sequence[int]], max_rows: int, num_slots: int
    ) -> Batch | None:
        per_token = cache_bytes_per_token(verifier.base)
        version = weights_version(verifier.base.model)

        def fits(batch: Batch) -> bool:
            slots, rows = (
                max(num_slots, batch.cache.num_slots),
                max(max_rows, len(batch.cache.lengths)),
            )
            return per_token * slots * rows <= self.most_bytes

        with self._lock:
            self._idle = [b for b in self._idle if b.weights_version == version]
            fitting = [b for b in self._idle if b.verifier is verifier and fits(b)]
            if not fitting:
                return None
            best = max(fitting, key=lambda batch: _shared(batch, prompts))
            self._idle.remove(best)
        slots, places = best.cache.num_slots, max(max_rows, len(best.cache.lengths))
        if num_slots > slots:
            slots = max(
                num_slots, min(int(GROWTH * num_slots), self.most_bytes // (per_token * places))
            )
        if (slots, places) != (best.cache.num_slots, len(best.cache.lengths)):
            best.grow(slots, places)
        return best

    def _give_back(self, batch: Batch) -> None:
        batch.clear()
        with self._lock:
            self._idle.append(batch)
            while self._idle and sum(one.cache.num_bytes for one in self._idle) > self.most_bytes:
                self._idle.pop(0)


def _shared(batch: Batch, prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of these prompts that the batch holds."""
    return sum(
        max((common_length(held, prompt) for held in batch.held.tokens), default=0)
        for prompt in prompts
    )
