"""Batches that wait for their next request, with what their rows hold: prefixes are read once.

A request takes a batch for itself and gives it back at its end; other threads take others. What is
kept is bounded in bytes, and the batch that was used longest ago goes first.

What a model read is of no use once it is another one (a hook, an adapter, weights written to), so
the two are compared (model_state.py). Where that cannot be done nothing is kept, and prefixes are
shared within a call alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from medusa_kit.infer.batch import Batch
from medusa_kit.infer.cpu.mkl_linear import forget_packs
from medusa_kit.infer.memory import cache_bytes_per_token
from medusa_kit.infer.prefix_cache.model_state import State, state_of
from medusa_kit.infer.prefix_cache.prefixes import common_length
from medusa_kit.infer.verifier import Verifier
from medusa_kit.locks import SharedLock

KEPT_BYTES = 1 << 29
KEPT_SHARE = 0.25  # of a device's memory: an 8B model's conversation of 64k tokens takes 8 GB
GROWTH = 1.25  # more slots than asked for, since a conversation will soon ask for more
WORTH_KEEPING = 8  # tokens that a batch must hold of the prompts; fewer are read as fast
MAX_PLACES = 2  # times the rows asked for, in a batch whose rows are made longer


class KeptBatches:
    """The batches of one base model. `most_bytes`: of keys and values in batches that wait.
    `reuse_prefixes`: off, batches are kept for the forwards captured over their caches alone."""

    def __init__(self, most_bytes: int = KEPT_BYTES, reuse_prefixes: bool = True) -> None:
        self.most_bytes, self.reuse_prefixes = most_bytes, reuse_prefixes
        self._idle: list[tuple[Batch, State]] = []  # the one used last comes last
        self._lock = SharedLock()

    @classmethod
    def for_verifier(cls, verifier: Verifier, reuse_prefixes: bool) -> "KeptBatches | None":
        """What its requests need; None: each has a batch of its own."""
        if not (reuse_prefixes or verifier.captures):
            return None
        return cls(most_kept(verifier.base.device), reuse_prefixes)

    @contextmanager
    def borrowed(
        self,
        verifier: Verifier,
        prompts: Sequence[Sequence[int]],
        max_rows: int,
        num_slots: int,
    ) -> Iterator[Batch]:
        """A batch for at most `max_rows` rows at once; the one that holds most of the prompts."""
        state = state_of(verifier)
        batch = self._take(verifier, state, prompts, max_rows, num_slots)
        if batch is None:
            batch = Batch(verifier, max_rows, num_slots, reuse_prefixes=self.reuse_prefixes)
        batch.use(max_rows)
        try:
            yield batch
        except GeneratorExit:  # an answer was not read to its end; that is between two steps
            if batch.cache.is_known:
                self._give_back(batch, state)
            raise
        except torch.OutOfMemoryError:
            self.forget()
            raise
        self._give_back(batch, state)

    def forget(self) -> None:
        """Drop the batches that wait."""
        with self._lock:
            self._idle.clear()

    def _take(
        self,
        verifier: Verifier,
        state: State,
        prompts: Sequence[Sequence[int]],
        max_rows: int,
        num_slots: int,
    ) -> Batch | None:
        """The batch that holds most of the prompts, if what it holds is worth having and making
        room in it for this request takes little."""
        per_token = cache_bytes_per_token(verifier.base, verifier.num_layers)

        def fits(batch: Batch) -> bool:
            cache, rows = batch.cache, max(max_rows, len(batch.cache.lengths))
            longer = num_slots > cache.num_slots
            few = not longer or rows <= MAX_PLACES * max_rows
            return few and cache.num_bytes <= self.most_bytes

        # Forwards captured over a batch's cache are worth keeping whatever it holds.
        least = 0 if verifier.captures else WORTH_KEEPING
        with self._lock:
            current = [
                one for one in self._idle if one[0].verifier is not verifier or one[1] == state
            ]
            if len(current) < len(self._idle):
                forget_packs(verifier.base.model)  # of weights that have changed, perhaps
            self._idle = current
            worth = [
                (shared, batch)
                for batch, _ in self._idle
                if batch.verifier is verifier
                and (shared := _shared(batch, prompts)) >= least
                and fits(batch)
            ]
            if not worth:
                return None
            best = max(worth, key=lambda one: one[0])[1]
            self._idle = [one for one in self._idle if one[0] is not best]
        slots, places = best.cache.num_slots, max(max_rows, len(best.cache.lengths))
        if num_slots > slots:
            most = self.most_bytes // max(per_token * places, 1)
            slots = max(num_slots, min(int(GROWTH * num_slots), most))
        if (slots, places) != (best.cache.num_slots, len(best.cache.lengths)):
            best.grow(slots, places)
        return best

    def _give_back(self, batch: Batch, state: State) -> None:
        """`state`: the model's when the request began."""
        batch.clear()
        if state is None or batch.cache.num_bytes > self.most_bytes:
            return
        if state_of(batch.verifier) != state:  # changed meanwhile
            return
        with self._lock:
            self._idle.append((batch, state))
            while sum(one.cache.num_bytes for one, _ in self._idle) > self.most_bytes:
                self._idle.pop(0)


def most_kept(device: torch.device) -> int:
    """Bytes that batches may hold while they wait."""
    if device.type != "cuda":
        return KEPT_BYTES
    return int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)


def _shared(batch: Batch, prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of these prompts that the batch holds, where taking them would not cost another
    conversation more: a common system prompt is no reason to overwrite what follows it."""
    prefixes = batch.prefixes

    def gain(place: int, prompt: Sequence[int]) -> int:
        common = common_length(prefixes.tokens[place], prompt)
        return common if prefixes.may_overwrite(place, common) else 0

    places = range(len(prefixes.tokens))
    return sum(max((gain(place, prompt) for place in places), default=0) for prompt in prompts)
