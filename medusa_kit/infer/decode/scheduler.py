"""All requests of one base model: in which batch each is decoded, and what batches keep for others.

A batch (batch.py) is what shares a forward and a KV cache. A thread that has requests of its own
decodes them by `run`, in a batch that it has to itself. A thread that takes requests from others
(threaded/) calls `add` and `step`. A forward has one adapter, so there requests of one adapter form
a batch of their own; each step is that of the batch that has waited longest.

Between two runs batches are idle, with what they have read: prefixes are read once. What is kept is
bounded in bytes, and the batch that was used longest ago goes first. What a model read is of no use
once it is another one (a hook, an adapter, weights written to), so a look is taken at the model
before each answer and after it, unless nobody reads it to its end (infer/renewal.py). Where that
cannot tell nothing is kept, and prefixes are shared within a run alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from medusa_kit.errors import Live
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.measured import MeasuredSteps
from medusa_kit.infer.decode.node_choice.cost import LearnedSteps
from medusa_kit.infer.decode.request import Emitted, Request
from medusa_kit.infer.memory import cache_bytes_per_token, explain_oom
from medusa_kit.infer.renewal import State, changed, may_change_unseen, state_of, up_to_date
from medusa_kit.infer.verifier import Verifier
from medusa_kit.locks import SharedLock
from medusa_kit.no_gradients import no_gradients

KEPT_BYTES = 1 << 29
KEPT_SHARE = 0.25  # of a device's memory: an 8B model's conversation of 64k tokens takes 8 GB
GROWTH = 1.25  # more room than asked for, since a conversation will soon ask for more
WORTH_KEEPING = 8  # tokens that a batch must cache of the prompts; fewer are read as fast
MAX_SLOTS = 2  # times the requests at once, in a batch whose slots are made longer


@dataclass(frozen=True)
class BatchStats:
    """How requests stood after the last step."""

    running: int = 0
    reading: int = 0  # their prompts are being read
    waiting: int = 0  # without a slot
    steps: int = 0  # forwards over trees so far
    nodes: int = 0  # in the last of them
    held_prefixes: int = 0  # slots of no request that keep the text of an earlier one
    cached_tokens: int = 0  # in them


class Scheduler(Live):
    """The requests of one base model.

    `verifier`: for requests that name none. `max_rows`: requests of each batch that `step` decodes
    at once; 0: requests come by `run` alone. `max_pause`: as in Batch, between two of these steps.
    `reuse_prefixes`: off, batches are kept for the forwards captured over their caches alone.
    `kept_bytes`: of keys and values in idle batches; 0: a run's batch is its own. `steps`: their
    cost; draft tokens that do not gain are not verified then.
    """

    def __init__(
        self,
        verifier: Verifier,
        max_rows: int = 0,
        max_pause: float | None = None,
        *,
        reuse_prefixes: bool = False,
        kept_bytes: int = 0,
        steps: MeasuredSteps | LearnedSteps | None = None,
    ) -> None:
        self.verifier, self.max_rows, self._max_pause = verifier, max_rows, max_pause
        self.reuse_prefixes, self.kept_bytes, self.steps = reuse_prefixes, kept_bytes, steps
        self._idle: list[tuple[Batch, State]] = []  # the one used last comes last
        self._lock = SharedLock()  # for those
        self._abandoned: list[tuple[Batch, State]] = []  # idle since nobody read an answer on
        # Of the thread that steps. The one that has waited longest comes first.
        self._stepped: dict[Verifier, Batch] = {}
        self._unseen: set[Verifier] = set()  # whose model was not looked at since requests came
        self._finished: list[Request] = []
        self._num_steps = self._num_nodes = 0
        if max_rows:  # stays while it has no requests
            self._stepped[verifier] = self._batch_to_step(verifier)

    @no_gradients
    def run(
        self, requests: Sequence[Request], drafter: Drafter, max_rows: int | None = None
    ) -> Iterator[Emitted]:
        """Decode requests of one verifier, at most `max_rows` of them together; yields what each
        step emitted. Several threads may do so at once.

        Raises DeviceMemoryError where memory is too small; a smaller request works. Raises
        ModelChangedError where the model changed meanwhile, and what `up_to_date` raises. Raises
        what a request failed of.
        """
        verifier = self._verifier_for(requests[0], drafter)
        number = up_to_date(verifier)
        max_rows = min(max_rows or len(requests), len(requests))
        tree = verifier.positions_of_tree(drafter.num_nodes)
        num_positions = max(request.num_positions for request in requests) + tree - 1
        with explain_oom(verifier.base, max_rows, drafter.num_nodes, num_positions):
            state = state_of(verifier) if self.kept_bytes else None
            prompts = [request.prompt_ids for request in requests]
            batch = self._idle_batch(verifier, state, prompts, max_rows, num_positions) or Batch(
                verifier, max_rows, num_positions, reuse_prefixes=self.reuse_prefixes
            )
            batch.use(max_rows)
            batch.cost = (
                self.steps.cost if self.steps is not None and drafter.has_candidates else None
            )
            try:
                for request in requests:
                    batch.add(request, drafter)
                while batch.num_requests:
                    if emitted := batch.step():
                        batch.remove_finished()  # not as late as when nobody reads on
                        yield emitted
                    batch.raise_error()
            except GeneratorExit:  # not read to its end; that is between two steps
                self._abandon(batch, state)
                raise
            except torch.OutOfMemoryError:
                verifier.make_room()
                with self._lock:
                    self._idle.clear()
                    self._abandoned.clear()
                raise
            except Exception as error:
                if verifier.base.look() != number:  # which may be why it failed
                    raise changed() from error
                raise
            if verifier.base.look() != number:
                raise changed()
            self._keep(batch, state)

    def add(self, request: Request, drafter: Drafter) -> None:
        """Let a request in, which `step` decodes from now on. Raises what `Batch.add` raises."""
        verifier = self._verifier_for(request, drafter)
        if verifier not in self._stepped:
            self._stepped[verifier] = self._batch_to_step(verifier)
        self._stepped[verifier].add(request, drafter)
        self._unseen.add(verifier)

    @no_gradients
    def step(self) -> Emitted:
        """What one step of one batch emitted."""
        self._remove_finished()
        batch = next((batch for batch in self._stepped.values() if batch.num_requests), None)
        if batch is None:
            return []
        self._stepped[batch.verifier] = self._stepped.pop(batch.verifier)
        before = batch.num_steps
        if batch.verifier in self._unseen:
            self._look(batch)
        emitted = batch.step()
        if batch.has_ended:
            self._look(batch)
        self._num_steps += batch.num_steps - before
        self._num_nodes = batch.num_nodes
        return emitted

    def _look(self, batch: Batch) -> None:
        """Look at the model before a batch's answers begin and when some have ended. Where it has
        changed, those under way, and those that end with this step, are of neither model."""
        self._unseen.discard(batch.verifier)
        number = up_to_date(batch.verifier)
        if number != batch.number:
            batch.number = number
            batch.start_over(changed())

    def fail(self, error: Exception) -> None:
        """End all requests that were added: `error` was none of a request's or a drafter's."""
        for batch in self._stepped.values():
            batch.fail(error)

    def take_finished(self) -> list[Request]:
        """Requests that were added and have left since the last call."""
        self._remove_finished()
        finished, self._finished = self._finished, []
        return finished

    @property
    def stats(self) -> BatchStats:
        """How requests that were added stand, without those that wait."""
        batches = self._stepped.values()
        cached = [count for batch in batches for count in batch.cached_tokens]
        return BatchStats(
            sum(batch.num_running for batch in batches),
            sum(batch.num_reading for batch in batches),
            steps=self._num_steps,
            nodes=self._num_nodes,
            held_prefixes=len(cached),
            cached_tokens=sum(cached),
        )

    @property
    def idle(self) -> list[Batch]:
        """Batches that no run uses, with what they keep for later ones; the last was used last."""
        with self._lock:
            self._gather()
            return [batch for batch, _ in self._idle]

    def _verifier_for(self, request: Request, drafter: Drafter) -> Verifier:
        """The verifier that the request was made for. It watches the layers that the scheduler's
        own does, which costs little, where the drafter needs no others."""
        verifier = request.verifier or self.verifier
        return verifier.with_watched(drafter.watches or self.verifier.watched)

    def _batch_to_step(self, verifier: Verifier) -> Batch:
        batch = Batch(
            verifier,
            self.max_rows,
            verifier.positions_for(self.max_rows),
            self._max_pause,
            self.reuse_prefixes,
        )
        verifier.prepare(batch.cache, self.max_rows)
        batch.cost = None if self.steps is None else self.steps.cost
        return batch

    def _remove_finished(self) -> None:
        for verifier, batch in list(self._stepped.items()):
            self._finished += batch.take_finished()
            if verifier is not self.verifier and not batch.num_requests:
                del self._stepped[verifier]

    def _idle_batch(
        self,
        verifier: Verifier,
        state: State,
        prompts: Sequence[Sequence[int]],
        max_rows: int,
        num_positions: int,
    ) -> Batch | None:
        """The idle batch that caches most of the prompts, if that is worth having and making room
        in it for these requests takes little."""
        # Forwards captured over a batch's cache are worth keeping whatever it caches.
        min_shared = 0 if verifier.captures else WORTH_KEEPING

        def fits(batch: Batch) -> bool:
            num_slots = max(max_rows, len(batch.cache.lengths))
            return num_positions <= batch.cache.num_positions or num_slots <= MAX_SLOTS * max_rows

        with self._lock:
            self._gather()
            current = [
                (batch, then)
                for batch, then in self._idle
                if batch.verifier is not verifier or then == state
            ]
            self._idle = current
            candidates = [
                (shared, batch)
                for batch, _ in self._idle
                if batch.verifier is verifier
                and (shared := batch.slots.num_shared(prompts)) >= min_shared
                and fits(batch)
            ]
            if not candidates:
                return None
            _, best = max(candidates, key=lambda candidate: candidate[0])
            self._idle = [(batch, then) for batch, then in self._idle if batch is not best]
        self._make_room(best, max_rows, num_positions)
        return best

    def _make_room(self, batch: Batch, max_rows: int, num_positions: int) -> None:
        positions, slots = batch.cache.num_positions, max(max_rows, len(batch.cache.lengths))
        if num_positions > positions:
            per_token = cache_bytes_per_token(batch.verifier.base, batch.verifier.num_layers)
            max_positions = self.kept_bytes // max(per_token * slots, 1)
            positions = max(num_positions, min(int(GROWTH * num_positions), max_positions))
        if (positions, slots) != (batch.cache.num_positions, len(batch.cache.lengths)):
            batch.grow(positions, slots)

    def _keep(self, batch: Batch, state: State) -> None:
        """Keep a batch for other runs, without its requests. `state`: the model's when this one
        began."""
        batch.clear()
        if state is None or batch.cache.num_bytes > self.kept_bytes:
            return
        if state_of(batch.verifier) != state:  # tables that the model writes to itself
            return
        with self._lock:
            self._gather()
            self._idle.append((batch, state))
            self._drop_oldest()

    def _abandon(self, batch: Batch, state: State) -> None:
        """Keep a batch whose run nobody reads on. Python may end it wherever it looks for garbage,
        amid anything and under any of torch's modes: no lock is taken and nothing computed. Nor is
        the model looked at; the next run does, which cannot tell whether it was another one for a
        while. So what was read of one that may have been is not kept, captured forwards are."""
        batch.clear()
        # Where Python found the run out of reach, what its cache refers to may be gone.
        if state is None or not batch.cache.is_known:
            return
        kept = sum(other.cache.num_bytes for other, _ in self._abandoned)
        if kept + batch.cache.num_bytes > self.kept_bytes:
            return
        if may_change_unseen(batch.verifier, state):
            batch.forget()
        self._abandoned.append((batch, state))

    def _gather(self) -> None:
        """Count what was abandoned among idle batches. The caller holds their lock."""
        abandoned, self._abandoned = self._abandoned, []
        self._idle += abandoned
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while sum(kept.cache.num_bytes for kept, _ in self._idle) > self.kept_bytes:
            self._idle.pop(0)


def max_kept_bytes(device: torch.device) -> int:
    """Bytes that the KV caches of idle batches may take."""
    if device.type != "cuda":
        return KEPT_BYTES
    return int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
