"""Steps of the decoding loop behind the same prompts, again and again, for what times them."""

import time
from collections.abc import Iterator, Sequence

from medusa_kit.infer.chains.cache import ChainCache
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.timing import Clock, StepTiming
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.sampling import SamplingParams

# Most steps of a kind in a row that do not count, and the seconds after which times are steady
# before that: for some milliseconds after a large step a small one takes up to two thirds longer.
IN_A_ROW, SETTLED = 4, 0.01


class RepeatedSteps:
    """Requests with these prompts, in one batch, whose KV cache keeps the prompts."""

    def __init__(
        self,
        verifier: Verifier,
        prompts: Sequence[Sequence[int]],
        clock: Clock = time.perf_counter,
    ) -> None:
        self._verifier, self._prompts = verifier, prompts
        self._batch = Batch(verifier, len(prompts), clock=clock)

    def timings(
        self, drafter: Drafter, max_steps: int, num_unread: int = 0
    ) -> Iterator[StepTiming]:
        """The timings of `max_steps` steps in a row, or of fewer where the context ends.
        `num_unread`: tokens of the prompt that each reads in front of its chain (infer/chains/)."""
        batch = self._batch
        room = self._verifier.base.info.context_length - max(map(len, self._prompts))
        tokens = min(1 + max_steps * (drafter.num_nodes + num_unread), room)
        for prompt in self._prompts:
            request = make_request(self._verifier, prompt, SamplingParams(), tokens)
            request.stop_ids = frozenset()
            batch.add(request, drafter)
        try:
            while max_steps and batch.num_requests == len(self._prompts):
                if isinstance(batch.cache, ChainCache) and batch.num_running:
                    batch.cache.unread = [list(prompt[:num_unread]) for prompt in self._prompts]
                batch.step()
                if batch.timing is not None:
                    max_steps -= 1
                    yield batch.timing
            batch.raise_error()
        finally:
            batch.clear()

    def settled(self, drafter: Drafter, count: int, num_unread: int = 0) -> list[StepTiming]:
        """The timings of `count` steps, behind some that do not count."""
        settled, before, seconds = list[StepTiming](), 0, 0.0
        for timing in self.timings(drafter, IN_A_ROW + count, num_unread):
            if before == IN_A_ROW or seconds > SETTLED or settled:
                settled.append(timing)
            else:
                before, seconds = before + 1, seconds + timing.seconds
            if len(settled) == count:
                break
        return settled or [timing]  # the context ends
