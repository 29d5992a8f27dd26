"""All requests of one base model: in which batch each is decoded, and what batches keep for others.

A batch (batch.py) is what shares a forward and a KV cache. Callers (caller.py) let requests in, in
any thread, and each makes steps until its own are done. A step is one of the batch that has waited
longest, with the requests of all callers in it, so whoever makes it serves the others too
(turn.py). A forward has one adapter, so requests of one adapter form a batch of their own.

Batches without requests keep what they have read: prefixes are read once. What is kept is bounded
in bytes, and the batch that was used longest ago goes first. What a model read is of no use once it
is another one (a hook, an adapter, weights written to), so a look is taken at the model before each
answer and after it, unless nobody reads it to its end (infer/renewal.py). Where that cannot tell
nothing is kept, and prefixes are shared within a call alone.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident, main_thread
from typing import Any
from weakref import WeakSet

import torch

from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.errors import ClosedError, Live
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.caller import Caller
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.measured import MeasuredSteps
from medusa_kit.infer.decode.node_choice.cost import LearnedSteps
from medusa_kit.infer.decode.request import Emitted, Request
from medusa_kit.infer.decode.turn import Taken, Turn, undisturbed
from medusa_kit.infer.memory import cache_bytes_per_token, explain_oom
from medusa_kit.infer.renewal import changed, state_of, up_to_date
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients

KEPT_BYTES = 1 << 29
KEPT_SHARE = 0.25  # of a device's memory: an 8B model's conversation of 64k tokens takes 8 GB
GROWTH = 1.25  # more room than asked for, since a conversation will soon ask for more
WORTH_KEEPING = 8  # tokens that a batch must cache of the prompts; fewer are read as fast
WORTH_OF_COMPANY = 64  # tokens that an unused batch must cache more of, to be used alone
MAX_PAUSE = 0.1  # seconds for which one call's prompts hold up another one's answers
INTERRUPTED = "another answer of the batch was interrupted amid a step"
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
    """The requests of one base model, of any number of callers.

    `verifier`: for requests that name none. `reuse_prefixes`: off, batches are kept for the
    forwards captured over their caches alone. `kept_bytes`: of keys and values in batches without
    requests; 0: none is kept. `steps`: their cost; draft tokens that do not gain are not verified.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        reuse_prefixes: bool = False,
        kept_bytes: int = 0,
        steps: MeasuredSteps | LearnedSteps | None = None,
    ) -> None:
        self.verifier = verifier
        self.reuse_prefixes, self.kept_bytes, self.steps = reuse_prefixes, kept_bytes, steps
        self._batches: list[Batch] = []  # the one that was stepped last comes last
        self._at_work: Batch | None = None
        self._device_type = verifier.base.device.type
        self._turn = Turn()
        _schedulers.add(self)

    @no_gradients
    def run(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        max_rows: int | None = None,
        caller: Caller | None = None,
    ) -> Iterator[Any]:
        """Decode requests of one verifier, at most `max_rows` of them together; yields what each
        step emitted (`Emitted`, or what the note of `caller` returns). Several threads may do so at
        once: their requests share steps.

        Raises DeviceMemoryError where memory is too small; a smaller request works. Raises
        ModelChangedError where the model changed meanwhile, and what `up_to_date` raises. Raises
        what a request failed of.
        """
        max_rows = min(max_rows or len(requests), len(requests))
        caller = caller or Caller(max_rows)
        longest = max(request.num_positions for request in requests)
        with explain_oom(
            self.verifier.base, max_rows, drafter.num_nodes, longest + drafter.num_nodes - 1
        ):
            try:
                # Autocast is the thread's own, and so its batch is.
                if self._autocast:
                    self._begin(requests, drafter, caller)
                else:
                    undisturbed(lambda: self._begin(requests, drafter, caller))
                while caller.num_requests or caller.news:
                    if not caller.news:
                        self._serve(caller)
                    if caller.news:
                        yield caller.take_news()
                    if caller.finished and not caller.news:
                        caller.raise_error()
            except Exception as error:
                self.end(caller)
                if is_out_of_memory(error):
                    self._make_memory()
                raise
            finally:  # wherever Python collects garbage, if nobody reads on
                caller.leave()

    def add(self, request: Request, drafter: Drafter, caller: Caller) -> None:
        """Let a request in, which `step` decodes from now on. Raises where there is no memory for
        so long a request."""
        with self._turn.taken():
            verifier = self._verifier_for(request, drafter)
            batch = self._batch_of(caller, verifier) or self._batch_to_join(
                caller, verifier, [request.prompt_ids], 0
            )
            if batch is None:
                batch = self._new_batch(verifier, caller, verifier.positions_for(caller.max_rows))
            batch.unseen = True
            self._let_in(batch, [request], drafter, caller)

    @no_gradients
    def step(self, caller: Caller) -> None:
        """Make a step, of the batch that has waited longest, or wait for one of another thread that
        serves this caller. Its news are there then, if the step emitted something of it."""
        self._serve(caller)

    def _serve(self, caller: Caller) -> None:
        caller.waits, taken = True, Taken(self._turn)
        try:
            if self._turn.to_step(taken, caller, self._may_step):
                self._step(caller)
        finally:  # of `to_step`, too: Ctrl-C may come at any line
            caller.waits = False
            self._turn.give_back(taken)

    def prepare(self, caller: Caller, watched: Sequence[int] = ()) -> None:
        """Make a batch that stays as long as the caller, and what its first requests would wait
        for. `watched`: layers that drafters may read."""
        with self._turn.taken():
            verifier = self.verifier.with_watched(tuple(watched) or self.verifier.watched)
            batch = self._new_batch(verifier, caller, verifier.positions_for(caller.max_rows))
            batch.stays_for = caller
            verifier.prepare(batch.cache, caller.max_rows)
            if self.steps is not None:
                batch.cost = self.steps.cost

    def end(self, caller: Caller) -> None:
        """End the requests of a caller that leaves."""
        caller.leave()
        undisturbed(self._tidy)

    def _tidy(self) -> None:
        with self._turn.taken():
            self._remove_those_who_left(list(self._batches))

    def stats_of(self, caller: Caller) -> BatchStats:
        """How its requests stand, without those that wait; of a step the numbers of its batches."""
        batches = [batch for batch in self._batches if caller in batch.callers]
        own = [one for batch in batches for one in batch.served if one.caller is caller]
        running = sum(1 for request in own if request.text)
        cached = [count for batch in batches for count in batch.cached_tokens]
        newest = batches[-1] if batches else None
        return BatchStats(
            running,
            len(own) - running,
            steps=sum(batch.num_steps for batch in batches),
            nodes=newest.num_nodes if newest else 0,
            held_prefixes=len(cached),
            cached_tokens=sum(cached),
        )

    @property
    def idle(self) -> list[Batch]:
        """Batches without requests, with what they keep for later ones; the last was used last."""
        with self._turn.taken():
            self._remove_those_who_left(list(self._batches))
            return [batch for batch in self._batches if not batch.callers]

    def _verifier_for(self, request: Request, drafter: Drafter) -> Verifier:
        """The verifier that the request was made for, with the layers that its drafter reads."""
        verifier = request.verifier or self.verifier
        return verifier.with_watched(drafter.watches or self.verifier.watched)

    def _begin(self, requests: Sequence[Request], drafter: Drafter, caller: Caller) -> None:
        """Let requests of one verifier in."""
        with self._turn.taken():
            verifier = self._verifier_for(requests[0], drafter)
            number = up_to_date(verifier)
            tree = verifier.positions_of_tree(drafter.num_nodes)
            num_positions = max(request.num_positions for request in requests) + tree - 1
            prompts = [request.prompt_ids for request in requests]
            batch = self._batch_to_join(caller, verifier, prompts, num_positions)
            batch = batch or self._new_batch(verifier, caller, num_positions)
            self._note_model(batch, number)
            self._let_in(batch, requests, drafter, caller)

    def _let_in(
        self, batch: Batch, requests: Sequence[Request], drafter: Drafter, caller: Caller
    ) -> None:
        try:
            for request in requests:
                batch.add(request, drafter)
                request.caller = caller
                caller.num_requests += 1
        except BaseException:
            self._remove_callers(batch)
            raise
        if batch.cost is None and self.steps is not None and drafter.has_candidates:
            batch.cost = self.steps.cost

    def _may_step(self, caller: Caller) -> bool:
        """Whether the main thread may make a step for this caller. Ctrl-C may cut it off anywhere,
        so one for other threads is left to these, as long as they make steps themselves."""
        return not any(
            caller in batch.callers and len(batch.callers) > 1 and _serves_others(batch, caller)
            for batch in self._batches
        )

    def _step(self, caller: Caller) -> None:
        autocast = torch.is_autocast_enabled(
            self._device_type
        )  # of this thread: others' steps would be computed otherwise
        batches = [one for one in self._batches if one.callers and one.autocast == autocast]
        if get_ident() == main_thread().ident:
            batches = [
                one for one in batches if one.callers == [caller] or not _serves_others(one, caller)
            ]
        if any(one.has_left or one.cancelled for batch in batches for one in batch.callers):
            self._remove_those_who_left(batches)
        batch = next((batch for batch in batches if batch.callers and batch.has_work), None)
        if batch is None:
            return
        self._batches.remove(batch)
        self._batches.append(batch)
        self._at_work, emitted, has_ended = batch, Emitted(), True
        try:
            if batch.unseen:
                self._note_model(batch, up_to_date(batch.verifier))
            emitted = batch.step()
            has_ended = batch.has_ended
            if has_ended and batch.verifier.base.look() != batch.number:
                batch.start_over(changed())
                batch.unseen = True
        except Exception as error:  # no request is to blame for it
            batch.fail(error)
        except BaseException:  # such as Ctrl-C, amid anything
            self._lose(batch, ClosedError(INTERRUPTED, hint="ask again"), but=caller)
            raise
        self._tell(batch, emitted, has_ended)

    def _note_model(self, batch: Batch, number: int) -> None:
        """Requests begin with the model in the state `number`. Where it has changed, those under
        way are of neither model."""
        batch.unseen = False
        if number != batch.number:
            batch.number = number
            batch.start_over(changed())
        if not batch.served:
            batch.state = state_of(batch.verifier)

    def _tell(self, batch: Batch, emitted: Emitted, has_ended: bool) -> None:
        """Hand out what a step emitted, and which requests have left."""
        finished = batch.take_finished() if has_ended else []
        if len(batch.callers) == 1:
            batch.callers[0].tell(emitted, finished)
        else:
            for caller in batch.callers:
                caller.tell(
                    [(one, tokens) for one, tokens in emitted if one.caller is caller],
                    [one for one in finished if one.caller is caller],
                )
        if has_ended:
            self._remove_callers(batch)

    def _remove_callers(self, batch: Batch) -> None:
        """Callers without a request in it leave a batch. One that nobody uses stays as it is worth
        keeping."""
        if not batch.callers:
            return
        present = {one.caller for one in batch.requests}
        batch.callers = [
            one for one in batch.callers
            if one in present or (one is batch.stays_for and not one.has_left)
        ]  # fmt: skip
        if not batch.callers:
            batch.stays_for = batch.cost = None
            if not self._is_worth_keeping(batch):
                self._batches.remove(batch)
            self._drop_oldest()

    def _is_worth_keeping(self, batch: Batch) -> bool:
        if not self.kept_bytes or batch.cache.num_bytes > self.kept_bytes or batch.state is None:
            return False
        return state_of(batch.verifier) == batch.state  # or the model's own tables have changed

    def _drop_oldest(self) -> None:
        idle = [batch for batch in self._batches if not batch.callers]
        while idle and sum(batch.cache.num_bytes for batch in idle) > self.kept_bytes:
            self._batches.remove(idle.pop(0))

    def _make_memory(self) -> None:
        with self._turn.taken():
            self._batches = [batch for batch in self._batches if batch.callers]
            self.verifier.make_room()

    def _remove_those_who_left(self, batches: Sequence[Batch]) -> None:
        """End requests that were cancelled, or that nobody waits for, which may be known for long:
        what was read of a model that may have been another one meanwhile is not kept."""
        for batch in batches:
            for caller in batch.callers:
                while caller.cancelled:
                    caller.cancelled.popleft().cancel()
            if any(caller.has_left for caller in batch.callers):
                for request in batch.requests:
                    if request.caller is not None and request.caller.has_left:
                        request.cancel()
                        request.is_abandoned = True
                self._tell(batch, [], has_ended=True)

    def _batch_of(self, caller: Caller, verifier: Verifier) -> Batch | None:
        """The batch that has requests of a caller, and may have this verifier's."""
        return next(
            (one for one in self._batches if caller in one.callers and one.suits(verifier)), None
        )

    def _new_batch(self, verifier: Verifier, caller: Caller, num_positions: int) -> Batch:
        batch = Batch(
            verifier,
            caller.max_rows,
            num_positions,
            caller.max_pause,
            reuse_prefixes=self.reuse_prefixes,
        )
        self._batches.append(batch)
        batch.state, batch.autocast = state_of(verifier), self._autocast
        batch.callers.append(caller)
        return batch

    @property
    def _autocast(self) -> bool:
        return torch.is_autocast_enabled(self._device_type)

    def _batch_to_join(
        self,
        caller: Caller,
        verifier: Verifier,
        prompts: Sequence[Sequence[int]],
        num_positions: int,
    ) -> Batch | None:
        """The batch that others use, or the one without requests that caches most of the prompts,
        if that is worth having; and if making room in it for these requests takes little."""
        self._remove_those_who_left(list(self._batches))
        state = state_of(verifier)
        for batch in [one for one in self._batches if not one.callers]:
            if batch.verifier is verifier and batch.state != state:
                self._batches.remove(batch)
        # Forwards captured over a batch's cache are worth keeping whatever it caches.
        min_shared = 0 if verifier.captures else WORTH_KEEPING
        found = list[tuple[int, Batch]]()
        for batch in self._batches:
            if not (batch.suits(verifier) and self._has_room(batch, caller, num_positions)):
                continue
            shared = batch.slots.num_shared(prompts)
            if batch.callers:
                found.append((shared + WORTH_OF_COMPANY, batch))
            elif shared >= min_shared:
                found.append((shared, batch))
        if not found:
            return None
        _, best = max(found, key=lambda pair: pair[0])
        self._make_room(best, caller, num_positions)
        best.autocast = self._autocast
        best.callers.append(caller)
        return best

    def _has_room(self, batch: Batch, caller: Caller, num_positions: int) -> bool:
        """Whether requests may join a batch; in one that is used, what was read of the model must
        hold for all, and no forward captured over its cache may be lost."""
        rows = caller.max_rows + sum(one.max_rows for one in batch.callers)
        slots = max(rows, len(batch.cache.lengths))
        is_long_enough = num_positions <= batch.cache.num_positions
        if batch.callers:
            if batch.autocast != self._autocast or batch.state != (state_of(batch.verifier) or ()):
                return False
            if batch.verifier.captures:
                return is_long_enough and rows <= len(batch.cache.lengths)
            if batch.verifier.base.device.type == "cpu":  # room that is not written to takes none
                return True
        return is_long_enough or slots <= MAX_SLOTS * caller.max_rows

    def _make_room(self, batch: Batch, caller: Caller, num_positions: int) -> None:
        rows = caller.max_rows + sum(one.max_rows for one in batch.callers)
        positions, slots = batch.cache.num_positions, max(rows, len(batch.cache.lengths))
        if num_positions > positions:
            per_token = cache_bytes_per_token(batch.verifier.base, batch.verifier.num_layers)
            max_positions = self.kept_bytes // max(per_token * slots, 1)
            positions = max(num_positions, min(int(GROWTH * num_positions), max_positions))
        if (positions, slots) != (batch.cache.num_positions, len(batch.cache.lengths)):
            batch.grow(positions, slots)
        pauses = [one.max_pause for one in (caller, *batch.callers) if one.max_pause is not None]
        if batch.callers and not pauses:  # one caller's prompts hold up the other's answers
            pauses = [MAX_PAUSE]
        batch.use(rows, min(pauses, default=None))

    def _lose(self, batch: Batch, error: Exception, but: Caller | None = None) -> None:
        """End all requests of a batch that is in no state to go on. `but`: a caller that knows."""
        self._batches.remove(batch)
        for caller in batch.callers:
            own = [one for one in batch.all_requests if one.caller is caller]
            if caller is but:
                caller.num_requests -= len(own)
                continue
            for request in own:
                request.fail(error)
            caller.tell([], own)
        batch.callers = []

    def _after_fork(self) -> None:
        """In a forked child, where no other thread exists: requests that those waited for end, and
        so does a batch amid a step."""
        if self._turn.reopen() and self._at_work in self._batches and self._at_work is not None:
            self._lose(self._at_work, ClosedError("the process was forked amid a step"))
        for batch in self._batches:
            for caller in batch.callers:
                caller.has_left |= caller.waits or caller.has_thread


_schedulers: WeakSet[Scheduler] = WeakSet()


def _after_fork() -> None:
    for scheduler in list(_schedulers):
        scheduler._after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_after_fork)


def _serves_others(batch: Batch, caller: Caller) -> bool:
    """Whether other threads make its steps, too, for requests of theirs."""
    return any(
        one.has_thread and one.num_requests and not one.has_left
        for one in batch.callers
        if one is not caller
    )


def max_kept_bytes(device: torch.device) -> int:
    """Bytes that the KV caches of idle batches may take."""
    if device.type != "cuda":
        return KEPT_BYTES
    return int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
