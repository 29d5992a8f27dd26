"""All requests of one base model: in which batch each is decoded, and what batches keep for others.

A batch (batch.py) is what shares a forward and a KV cache. One thread (step_thread.py) lets in the
requests of all callers (caller.py), and each of its steps is one of the batch that has waited
longest. A forward has one adapter, so requests of one adapter form a batch of their own.

Batches without requests keep what they have read: prefixes are read once. What is kept is bounded
in bytes, and the batch that was used longest ago goes first. There may be hundreds, so steps look
at batches in use alone. What a model read is of no use once it is another one (a hook, an adapter,
weights written to), so a look is taken at the model before each answer and after it, unless nobody
reads it to its end (infer/renewal.py). Where that cannot tell nothing is kept, and prefixes are
shared within a call alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from medusa_kit.errors import ClosedError, Live
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.caller import Caller
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.measured import MeasuredSteps
from medusa_kit.infer.decode.node_choice.cost import LearnedSteps
from medusa_kit.infer.decode.request import Emitted, Request
from medusa_kit.infer.decode.room import give_up_room, has_room, make_room, positions_of, rows_of
from medusa_kit.infer.decode.schedule import MAX_PAUSE
from medusa_kit.infer.renewal import changed, state_of, up_to_date
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients

WORTH_KEEPING = 8  # tokens that a batch must cache of the prompts; fewer are read as fast
WORTH_OF_COMPANY = 64  # tokens that an unused batch must cache more of, to be used alone


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


class Batches(Live):
    """The requests of one base model, of any number of callers. One thread owns it; options as of
    `Scheduler`."""

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
        self.used: list[Batch] = []  # by callers; the one that was stepped last comes last
        # Those without requests, with the bytes that they take; the one that was used last is last.
        self._idle: dict[Batch, int] = {}
        self._at_work: Batch | None = None
        # Whether something waits for the end of the step, as between two pieces of long prompts.
        self.is_asked: Callable[[], bool] = lambda: False

    def begin(self, requests: Sequence[Request], drafter: Drafter, caller: Caller) -> None:
        """Let in all requests of a caller, of one verifier. Raises what `up_to_date` raises, and
        where there is no memory for so long a request."""
        _use_threads_of(caller)
        with self._under(caller.autocast):
            verifier = self._verifier_for(requests[0], drafter)
            number = up_to_date(verifier)
            batch = self._batch_to_join(caller, verifier, requests, drafter)
            if batch is None:
                needed = positions_of(requests, verifier, drafter)
                batch = self._new_batch(verifier, caller, needed)
            self._note_model(batch, number)
            self._let_in(batch, requests, drafter, caller)

    def add(self, request: Request, drafter: Drafter, caller: Caller) -> None:
        """Let one more request of a caller in. Raises where there is no memory for so long a
        request."""
        _use_threads_of(caller)
        verifier = self._verifier_for(request, drafter)
        batch = self._batch_of(caller, verifier)
        batch = batch or self._batch_to_join(caller, verifier, [request], drafter)
        if batch is None:
            batch = self._new_batch(verifier, caller, verifier.positions_for(caller.max_rows))
        batch.unseen = True
        self._let_in(batch, [request], drafter, caller)

    def prepare(self, caller: Caller, watched: Sequence[int] = ()) -> None:
        """Make a batch that stays as long as the caller, and what its first requests would wait
        for. `watched`: layers that drafters may read."""
        verifier = self.verifier.with_watched(tuple(watched) or self.verifier.watched)
        batch = self._new_batch(verifier, caller, verifier.positions_for(caller.max_rows))
        batch.stays_for = caller
        with self._under(caller.autocast):
            verifier.prepare(batch.cache, caller.max_rows)
        if self.steps is not None:
            batch.cost = self.steps.cost

    @no_gradients
    def step(self) -> bool:
        """Make a step, of the batch that has waited longest. Returns whether there was one."""
        self.remove_those_who_left()
        batch = next((one for one in self.used if one.has_work), None)
        if batch is None:
            return False
        self.used.remove(batch)
        self.used.append(batch)
        self._at_work = batch
        try:
            with self._under(batch.autocast):
                emitted, has_ended = self._stepped(batch)
            self._tell(batch, emitted, has_ended)
        except BaseException as error:  # no request's and no drafter's, such as SystemExit
            self._lose(batch, _of_another(error))
        self._at_work = None
        return True

    def leave(self, caller: Caller) -> None:
        """End the requests of a caller that nobody waits for any more."""
        caller.has_left = True
        self.remove_those_who_left()

    def end(self, error: Exception) -> None:
        """End all requests."""
        for batch in list(self.used):
            self._lose(batch, error)

    @property
    def in_use(self) -> bool:
        """Whether a caller has a request here, or a batch."""
        return bool(self.used)

    def make_memory(self) -> None:
        """Free what no request uses."""
        self._idle.clear()
        self.verifier.make_room()

    def after_fork(self) -> None:
        """In a forked child: requests that other threads waited for end, and so does a batch amid a
        step."""
        if self._at_work is not None:
            self._lose(self._at_work, ClosedError("the process was forked amid a step"))
            self._at_work = None
        for batch in self.used:
            for caller in batch.callers:
                caller.has_left |= caller.is_wanted

    def stats_of(self, caller: Caller) -> BatchStats:
        """How its requests stand, without those that wait; of a step the numbers of its batches."""
        batches = [batch for batch in self.used if caller in batch.callers]
        own = [one for batch in batches for one in batch.served if one.caller is caller]
        running = sum(1 for request in own if request.text)
        cached = [count for batch in batches for count in batch.cached_tokens]
        newest = batches[-1] if batches else None
        return BatchStats(
            running,
            len(own) - running,
            steps=caller.num_steps,
            nodes=newest.num_nodes if newest else 0,
            held_prefixes=len(cached),
            cached_tokens=sum(cached),
        )

    @property
    def idle(self) -> list[Batch]:
        """Batches without requests, with what they keep for later ones; the last was used last."""
        self.remove_those_who_left()
        return list(self._idle)

    def _under(self, autocast: torch.dtype | None) -> AbstractContextManager[object]:
        """With the autocast of a caller's thread, if any."""
        if autocast is None:
            return nullcontext()
        return torch.autocast(self.verifier.base.device.type, autocast)

    def _verifier_for(self, request: Request, drafter: Drafter) -> Verifier:
        """The verifier that the request was made for, with the layers that its drafter reads."""
        verifier = request.verifier or self.verifier
        return verifier.with_watched(drafter.watches or self.verifier.watched)

    def _let_in(
        self, batch: Batch, requests: Sequence[Request], drafter: Drafter, caller: Caller
    ) -> None:
        try:
            for request in requests:
                request.caller = caller
                batch.add(request, drafter)
                caller.requests.add(request)
        except BaseException:
            self._remove_callers(batch)
            raise
        if batch.cost is None and self.steps is not None and drafter.has_candidates:
            batch.cost = self.steps.cost

    def _stepped(self, batch: Batch) -> tuple[Emitted, bool]:
        """What a step emitted, and whether requests have ended."""
        emitted, has_ended, before = Emitted(), True, batch.num_steps
        try:
            if batch.unseen:
                self._note_model(batch, up_to_date(batch.verifier))
            emitted = batch.step()
            for caller in batch.callers:
                caller.num_steps += batch.num_steps - before
            has_ended = batch.has_ended
            if has_ended and batch.verifier.base.look() != batch.number:
                batch.start_over(changed())
                batch.unseen = True
        except Exception as error:  # no request is to blame for it
            batch.fail(error)
        return emitted, has_ended

    def _note_model(self, batch: Batch, number: int) -> None:
        """Requests begin with the model in the state `number`. Where it has changed, those under
        way are of neither model."""
        batch.unseen = False
        if batch.verifier.number != number:  # another one than that of the requests
            up_to_date(batch.verifier)
        if number != batch.number:
            batch.number = number
            batch.start_over(changed())
        if not batch.served and batch.state != (state := state_of(batch.verifier)):
            batch.slots.forget_texts()
            batch.state = state

    def _tell(self, batch: Batch, emitted: Emitted, has_ended: bool) -> None:
        """Hand out what a step emitted, and which requests have left."""
        finished = batch.finished if has_ended else []
        if len(batch.callers) == 1:
            batch.callers[0].tell(emitted, finished)
        else:
            for caller in batch.callers:
                caller.tell(
                    [(one, tokens) for one, tokens in emitted if one.caller is caller],
                    [one for one in finished if one.caller is caller],
                )
        if has_ended:
            batch.take_finished()  # once all have been told
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
        if batch.callers:
            self._set_limits(batch)
            give_up_room(batch, self.kept_bytes)
            return
        batch.stays_for = batch.cost = None
        self.used.remove(batch)
        give_up_room(batch, self.kept_bytes)
        if self._is_worth_keeping(batch):
            self._idle[batch] = batch.cache.num_bytes
        self._drop_oldest()

    def _is_worth_keeping(self, batch: Batch) -> bool:
        if not self.kept_bytes or batch.cache.num_bytes > self.kept_bytes or batch.state is None:
            return False
        return state_of(batch.verifier) == batch.state  # or the model's own tables have changed

    def _drop_oldest(self) -> None:
        taken = sum(self._idle.values())
        for batch, num_bytes in list(self._idle.items()):
            if taken <= self.kept_bytes:
                break
            del self._idle[batch]
            taken -= num_bytes

    def remove_those_who_left(self) -> None:
        """End requests that nobody waits for, which may be known for long: what was read of a model
        that may have been another one meanwhile is not kept."""
        for batch in [one for one in self.used if any(who.has_left for who in one.callers)]:
            for request in batch.requests:
                if request.caller.has_left:
                    request.cancel()
                    request.is_abandoned = True
            self._tell(batch, [], has_ended=True)

    def _batch_of(self, caller: Caller, verifier: Verifier) -> Batch | None:
        """The batch that has requests of a caller, and may have this verifier's."""
        return next(
            (one for one in self.used if caller in one.callers and one.suits(verifier)), None
        )

    def _new_batch(self, verifier: Verifier, caller: Caller, num_positions: int) -> Batch:
        batch = Batch(
            verifier,
            caller.max_rows,
            num_positions,
            caller.max_pause,
            reuse_prefixes=self.reuse_prefixes,
        )
        self.used.append(batch)
        batch.state, batch.autocast = state_of(verifier), caller.autocast
        batch.is_asked = self.is_asked
        batch.callers.append(caller)
        return batch

    def _batch_to_join(
        self,
        caller: Caller,
        verifier: Verifier,
        requests: Sequence[Request],
        drafter: Drafter,
    ) -> Batch | None:
        """The batch that others use, or the one without requests that caches most of the prompts,
        if that is worth having; and if making room in it for these requests takes little."""
        self.remove_those_who_left()
        self._drop_outdated()
        # Forwards captured over a batch's cache are worth keeping whatever it caches.
        min_shared = 0 if verifier.captures else WORTH_KEEPING
        alone = positions_of(requests, verifier, drafter)
        longest = max(request.num_positions for request in requests)
        prompts, found = [request.prompt_ids for request in requests], list[tuple[int, Batch]]()
        for batch in (*self._idle, *self.used):
            if not self._computes_for(batch, caller, verifier):
                continue
            shared = batch.slots.num_shared(prompts)
            if batch.callers:
                shared += WORTH_OF_COMPANY
            elif shared < min_shared:
                continue
            if has_room(batch, caller, batch.positions_with(longest, drafter), alone):
                found.append((shared, batch))
        if not found:
            return None
        _, best = max(found, key=lambda pair: pair[0])
        if not make_room(best, caller, best.positions_with(longest, drafter), self.kept_bytes):
            return None
        if self._idle.pop(best, None) is not None:
            self.used.append(best)
        best.callers.append(caller)
        self._set_limits(best)
        return best

    def _drop_outdated(self) -> None:
        """Batches that keep what an earlier state of the model has computed."""
        for batch in list(self._idle):
            if batch.state != state_of(batch.verifier):
                del self._idle[batch]

    def _computes_for(self, batch: Batch, caller: Caller, verifier: Verifier) -> bool:
        """Whether a batch computes what this caller's requests ask for. In one that is used, what
        was read of the model must hold for all."""
        if batch.autocast != caller.autocast or not batch.suits(verifier):
            return False
        return not batch.callers or batch.state == (state_of(batch.verifier) or ())

    def _set_limits(self, batch: Batch) -> None:
        """As many rows as the callers of a batch may have together."""
        pauses = [one.max_pause for one in batch.callers if one.max_pause is not None]
        if len(batch.callers) > 1 and not pauses:  # one's prompts hold up the other's answers
            pauses = [MAX_PAUSE]
        batch.use(rows_of(batch.callers), min(pauses, default=None))

    def _lose(self, batch: Batch, error: Exception) -> None:
        """End all requests of a batch that is in no state to go on."""
        self.used = [one for one in self.used if one is not batch]
        self._idle.pop(batch, None)
        callers, batch.callers = batch.callers, []
        for caller in callers:
            # Those that have ended, too: nobody has heard so.
            own = [one for one in batch.all_requests if one in caller.requests]
            for request in own:
                request.finish_reason, request.error = "error", request.error or error
            caller.tell([], own)


def _use_threads_of(caller: Caller) -> None:
    """Steps that follow are made with as many as its own thread uses."""
    if torch.get_num_threads() != caller.num_threads:
        torch.set_num_threads(caller.num_threads)


def _of_another(error: BaseException) -> Exception:
    """The error for requests that have nothing to do with what ended their step."""
    if isinstance(error, Exception):
        return error
    ended = ClosedError(f"a step was ended by {type(error).__name__}: {error}", hint="ask again")
    ended.__cause__ = error
    return ended
