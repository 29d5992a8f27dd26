"""Decoding, the page to read first: propose trees, verify them in one forward, accept, commit.

Requests join and leave a batch between steps. Every drafter goes through this loop; plain decoding
is the drafter that proposes the root alone. The root is the base model's own next token: emitted
when it is chosen, committed by the next step.

Shapes: B requests, N nodes of all their trees, D hidden.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.errors import Live, NotFiniteError
from medusa_kit.infer.decode.accept.sampler import has_scores
from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.caller import Caller
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.group import Group, drafts_of, groups_of
from medusa_kit.infer.decode.node_choice.cost import StepCost
from medusa_kit.infer.decode.read_back import read_back
from medusa_kit.infer.decode.request import Emitted, FailAlone, Request, together_or_alone
from medusa_kit.infer.decode.schedule import Piece, Schedule
from medusa_kit.infer.decode.slots import WORTH_A_COPY, Slot, Slots, Start
from medusa_kit.infer.decode.timing import Clock, Laps, StepTiming
from medusa_kit.infer.details import token_scores
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.likeliest import no_scores
from medusa_kit.infer.mkl_linear import using_packs
from medusa_kit.infer.outputs import NodeScores, TextStates
from medusa_kit.infer.renewal import State, may_change_unseen
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients

T = TypeVar("T")
PromptEnd = tuple[Tensor, Tensor]  # hidden_1D and logits_V at the last token
# More room than before, where requests need more: those that follow, as a conversation's next turn,
# may need more still. On a CPU what nothing was written to takes no memory, and growing copies what
# was.
GROWTH, CPU_GROWTH = 1.25, 2.0
MAX_SLOTS = 2  # times the slots that requests need: more are given up, and not made longer
NOTHING_KNOWN: State = None


class Batch(Live):
    """Requests that are decoded together, at most `max_rows` of them. One thread owns it.

    A request that fails leaves (`Request.error` says why), alone, or with the others of its drafter
    where that failed. The cache holds what is committed, whatever failed, and the others go on.

    `num_positions`: tokens and nodes that a request may have; where one that is added needs more,
    room is made.
    `max_pause`: seconds for which prompts are read between two steps while requests run, and so the
    most by which they are held up; None: until all have been read.
    `reuse_prefixes`: what a slot still caches of an earlier request is not read again for a prompt
    that begins with it.
    """

    def __init__(
        self,
        verifier: Verifier,
        max_rows: int,
        num_positions: int = 0,
        max_pause: float | None = None,
        reuse_prefixes: bool = True,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.verifier, self._reuse, self._clock = verifier, reuse_prefixes, clock
        self.cache: TreeCache = verifier.new_cache(max_rows, num_positions)
        self.slots = Slots(max_rows)
        self._schedule: Schedule[Request] = Schedule(self.slots, max_rows, max_pause)
        self.cost: StepCost | None = None  # by which draft tokens are chosen; None: all are taken
        self._longest = self._max_nodes = 1
        self._finished: list[Request] = []  # that have left since `take_finished`
        self.num_steps = self.num_nodes = 0  # forwards over trees; nodes in the last one
        self.timing: StepTiming | None = None  # of the newest step, if it verified trees
        # Of the model when its requests began; whether it must be looked at before the next step.
        self.number, self.state, self.unseen = verifier.number, NOTHING_KNOWN, False
        self.callers: list[Caller] = []  # that have requests here
        self.stays_for: Caller | None = None  # that keeps it while it has none
        self.autocast: torch.dtype | None = None  # under which its steps are made, if any
        self.is_asked: Callable[[], bool] = lambda: False  # whether prompts should read on later

    @property
    def num_requests(self) -> int:
        """Requests that have not finished yet."""
        return len([one for one in self._schedule.requests if one.finish_reason is None])

    @property
    def requests(self) -> list[Request]:
        return self._schedule.requests

    @property
    def served(self) -> Sequence[Request]:
        """Those that have a slot."""
        return self._schedule.served

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do: not where all wait for their callers."""
        schedule = self._schedule
        return bool(self._finished) or any(
            one.caller.is_wanted for queue in (schedule.served, schedule.waiting) for one in queue
        )

    def suits(self, verifier: Verifier) -> bool:
        """Whether requests of this verifier may be decoded here, with more layers watched."""
        own = self.verifier
        return own is verifier or verifier.with_watched(verifier.watched or own.watched) is own

    @property
    def cached_tokens(self) -> list[int]:
        """How many tokens each slot without a request still caches of an earlier one, if any."""
        return [count for slot in self.slots.free if (count := len(slot.text))]

    @property
    def num_running(self) -> int:
        return len(self._schedule.running)

    def add(self, request: Request, drafter: Drafter) -> None:
        """Let a request in as soon as a slot is free. Those with the same drafter draft together.
        Raises, with nothing changed, where there is no memory for so long a request."""
        longest, max_nodes = self._sizes_with(request.num_positions, drafter)
        if (needed := longest + max_nodes - 1) > self.cache.num_positions:
            # Room for longer ones that follow, too: growing copies what is there.
            growth = CPU_GROWTH if self.verifier.base.device.type == "cpu" else GROWTH
            max_positions = self.verifier.base.info.context_length + max_nodes - 1
            positions = max(needed, min(int(growth * self.cache.num_positions), max_positions))
            slots = self._num_slots_for(self._schedule.max_rows)
            self._with_room(lambda: self.resize(positions, slots))
        self._longest, self._max_nodes = longest, max_nodes
        request.drafter = drafter
        self._schedule.add(request)

    def positions_with(self, num_tokens: int, drafter: Drafter) -> int:
        """How many tokens and nodes a slot needs room for once a request that may come to have so
        many tokens is here, too."""
        longest, max_nodes = self._sizes_with(num_tokens, drafter)
        return longest + max_nodes - 1

    def _sizes_with(self, num_tokens: int, drafter: Drafter) -> tuple[int, int]:
        """(tokens of the longest request, nodes of the largest tree, to which all may be padded)"""
        num_nodes = self.verifier.positions_of_tree(drafter.num_nodes)
        return max(self._longest, num_tokens), max(self._max_nodes, num_nodes)

    def resize(self, num_positions: int, num_slots: int) -> None:
        """Room for requests of this length, in so many slots: those of requests stay."""
        count = max(num_slots, self._num_needed)
        self.cache.grow(num_positions, count)
        self.slots.resize(count)

    def cut(self, max_rows: int) -> None:
        """Give up slots that nobody uses, with the memory of what they cache, where there are many
        more than `max_rows`."""
        if (count := self._num_slots_for(max_rows)) < len(self.slots.all):
            self.resize(self.cache.num_positions, count)

    def keep_newest(self, max_bytes: int) -> None:
        """Give up what was used longest ago of the slots that nobody uses, so that the others take
        no more memory than that, where pages of it can be given back."""
        kept = sorted(self.slots.free, key=lambda slot: -slot.last_used)
        while kept and self.cache.bytes_with([slot.number for slot in kept]) > max_bytes:
            oldest = kept.pop()
            oldest.text = []
            self.cache.keep_first(oldest.number, 0)
        self.cache.grow(self.cache.num_positions)

    def _num_slots_for(self, max_rows: int) -> int:
        """As many slots as there are; but where so many rows need far fewer, those alone. Forwards
        captured over all of them are worth more."""
        count, needed = len(self.slots.all), max(max_rows, self._num_needed)
        return needed if count > MAX_SLOTS * needed and not self.verifier.captures else count

    @property
    def _num_needed(self) -> int:
        """Slots up to the last one that a request is in."""
        slots = [one.slot.number for one in self._schedule.served if one.slot is not None]
        return max(slots, default=-1) + 1

    def use(self, max_rows: int, max_pause: float | None) -> None:
        """Decode at most `max_rows` requests at once from now on, which prompts hold up for
        `max_pause` seconds."""
        self._schedule.use(max_rows, max_pause)

    def clear(self) -> None:
        """Cancel every request; what is cached of them stays for others."""
        for request in self._schedule.requests:
            request.cancel()
        self.take_finished()

    def fail(self, error: Exception) -> None:
        """End every request here, since `error` was none of a request's or a drafter's."""
        for request in self._schedule.requests:
            request.fail(error)

    @property
    def finished(self) -> list[Request]:
        """Requests that have left since `take_finished`."""
        self.remove_finished()
        return self._finished

    @property
    def all_requests(self) -> list[Request]:
        """With those that have left and that nobody has taken yet."""
        return list(dict.fromkeys([*self._finished, *self._schedule.requests]))

    @property
    def has_ended(self) -> bool:
        """Whether requests have ended that nobody has taken yet."""
        schedule = self._schedule
        return bool(self._finished) or any(
            one.finish_reason for queue in (schedule.served, schedule.waiting) for one in queue
        )

    def start_over(self, error: Exception) -> None:
        """End every request that has begun, and those that have ended but were not taken yet, with
        `error`. Nothing is kept of what they read; the others go on waiting."""
        for request in (*self._schedule.served, *self._finished):
            request.finish_reason, request.error = "error", error
        self.remove_finished()
        self.cache = self.verifier.new_cache(len(self.cache.lengths), self.cache.num_positions)
        self.slots.forget_texts()

    def raise_error(self) -> None:
        """Raise the error of a request that failed and has left since the last call."""
        for request in self.take_finished():
            error, request.error = request.error, None
            try:
                if error is not None:
                    raise error
            finally:  # else error and request refer to each other, and hold what the step computed
                del error

    @no_gradients
    def step(self) -> Emitted:
        """Read what is due of prompts, then verify a tree for each request that runs. Those whose
        first token this step chose are verified by the next one where none ran before."""
        self.timing = None
        with using_packs():
            return self._step()

    def _step(self) -> Emitted:
        self.remove_finished()
        ran = any(request.text for request in self._schedule.served)
        emitted = self._read_prompts()
        if emitted:  # a first token may be the last
            self.remove_finished()
        if ran or not emitted:
            emitted += self._verify_trees()
        return emitted

    def remove_finished(self) -> None:
        """Requests that have finished leave; their drafters hear what has become of them."""
        queues = self._schedule.served, self._schedule.waiting
        while finished := [one for queue in queues for one in queue if one.finish_reason]:
            self._finished += finished  # first, since a drafter may raise what ends the step
            self._leave(finished)
        if not (self._schedule.served or self._schedule.waiting):
            self._longest = self._max_nodes = 1

    def take_finished(self) -> list[Request]:
        """Requests that have left since the last call."""
        self.remove_finished()
        finished, self._finished = self._finished, []
        return finished

    def _leave(self, finished: Sequence[Request]) -> None:
        for request in finished:
            self._schedule.leave(request)
            if (slot := request.slot) is not None:
                text = [*request.prompt_ids, *request.token_ids]
                # Others must not go on after keys and values that are no numbers.
                damaged = isinstance(request.error, NotFiniteError) or (
                    request.is_abandoned and may_change_unseen(self.verifier, self.state)
                )
                cached = [] if damaged else text[: self.cache.lengths[slot.number]]
                self.slots.leave(slot, cached, len(request.prompt_ids))
                request.slot = None
        for group in groups_of(finished):
            try:
                group.drafter.finish(group.requests)
            except Exception as error:  # the answers are there
                console.warn(f"drafter {group.drafter.name} could not keep answers: {error}")
        for request in finished:
            request.forget()

    def _read_prompts(self) -> Emitted:
        """The first token of each request whose prompt has been read to its end."""
        if not self._schedule.has_prompts:
            return []
        if admitted := self._schedule.admit(self._slot_for):
            for request in admitted:
                request.begin(self.verifier.attention)
            self.remove_finished()  # some may have failed
        emitted: Emitted = []
        for pieces in self._schedule.reading(self.verifier.prompt_chunk(1)):
            for piece, end in zip(pieces, self._read(pieces), strict=True):
                request = piece.request
                if piece.is_last and end is not None:
                    with FailAlone(request):
                        emitted += self._first_token(request, *self._with_scores(piece, end))
                if request.error is not None:
                    self.remove_finished()
            if self.is_asked():
                break
        return emitted

    def _read(self, pieces: Sequence[Piece[Request]]) -> list[PromptEnd | None]:
        """What there is at the last token of each piece; None where it failed."""

        def read(first: int, last: int) -> list[PromptEnd]:
            some_pieces = pieces[first:last]
            slots = _numbers([piece.request for piece in some_pieces])
            for piece, slot in zip(some_pieces, slots, strict=True):
                if self.cache.lengths[slot] != piece.start:  # by a call that failed
                    self.cache.keep_first(slot, piece.start)
            texts = [piece.request.prompt_ids[piece.start : piece.end] for piece in some_pieces]
            observed = [
                (piece.request, slot)
                for piece, slot in zip(some_pieces, slots, strict=True)
                if _reads_prompts(piece.request.drafter)
            ]
            seen = dict[int, TextStates]() if observed else None
            hidden_BD, logits_BV = self._with_room(
                lambda: self.verifier.read_prompts(self.cache, slots, texts, seen)
            )
            if seen:  # empty where C++ has read them, and no layers are watched
                for request, slot in observed:
                    request.prompt_parts.append(seen[slot])
            return list(zip(hidden_BD.split(1), logits_BV, strict=True))

        return together_or_alone(read, [piece.request for piece in pieces])

    def _with_scores(self, piece: Piece[Request], end: PromptEnd) -> PromptEnd:
        """The end of a prompt that was read, from which a token can follow. Where none can and
        others may be to blame, the prompt is read once more, whole and alone: a text that it went
        on after, or, where layers round a whole batch together, one that was read beside it.
        Raises NotFiniteError."""
        if has_scores(end[1]):
            return end
        request, length = piece.request, piece.end
        if not (request.num_cached or self.verifier.base.info.quantized):
            raise no_scores(length)
        request.num_cached, request.prompt_parts = 0, []
        for slot in _numbers([request]):
            self.cache.keep_first(slot, 0)
        (again,) = self._read([Piece(request, 0, length)])
        if again is None or not has_scores(again[1]):
            raise request.error or no_scores(length)
        return again

    def _with_room(self, work: Callable[[], T]) -> T:
        """What `work` returns; called once more where memory ran out and more can be had."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None  # its frames hold tensors
            if not self.verifier.make_room():
                raise
        return work()

    def _first_token(self, request: Request, hidden_1D: Tensor, logits_V: Tensor) -> Emitted:
        root = request.sampler.choose(logits_V, request.prompt_ids)
        if request.counts_near_ties:
            scores = NodeScores(hidden_1D, logits_V[None])
            request.near_ties += int(scores.near_ties(request.rounding_tolerance))
        emitted = request.take([root])
        if (count := request.output_options.num_top_tokens) is not None:
            request.scores = request.first_scores = token_scores(logits_V[None], emitted, count)
        self._begin(request, root, hidden_1D)
        return [(request, emitted)]

    def _slot_for(self, request: Request, later: Sequence[Request]) -> tuple[Slot, int]:
        """(slot for a request, tokens of its prompt that are cached there)."""
        start = Start(min(self.slots.free, key=lambda slot: slot.number), 0)
        with FailAlone(request):
            if self._reuse:
                prompts = [request.prompt_ids for request in later]
                start = self.slots.start(
                    request.prompt_ids, self._texts(), prompts, self.cache.usable
                )
            number = start.slot.number
            if start.source is not None:
                self.cache.copy_first(start.source.number, number, start.length)
            else:
                self.cache.keep_first(number, start.length)
            if start.common >= start.length + WORTH_A_COPY:
                self.cache.mark(number, start.common)
            request.num_cached = start.length
            return start.slot, start.length
        self.cache.forget(start.slot.number)  # it may hold a part of what was copied
        return start.slot, 0

    def _texts(self) -> dict[Slot, list[int]]:
        """What the cache holds, between steps, in slots of requests that run or are being read."""
        return {
            slot: request.text or request.prompt_ids[: self.cache.lengths[slot.number]]
            for request in self._schedule.served
            if (slot := request.slot) is not None
        }

    def _begin(self, request: Request, root: int, hidden_1D: Tensor) -> None:
        if request.finish_reason is not None:  # its first token was its last
            return
        request.text, request.root = list(request.prompt_ids), root
        request.hidden_ND, request.hidden_row = hidden_1D, 0
        if read := request.prompt_parts:
            request.prompt_hidden, request.prompt_layers = TextStates.joined(read)
        drafter = request.drafter
        assert drafter is not None
        with FailAlone(*(one for one in self._schedule.running if one.drafter is drafter)):
            drafter.begin(request)
        request.prompt_parts, request.prompt_hidden, request.prompt_layers = [], None, None

    def _verify_trees(self) -> Emitted:
        running = [
            request
            for request in self._schedule.served
            if request.text and (request.caller is None or request.caller.is_wanted)
        ]
        if not running:
            return []
        laps, unread = Laps(self._clock), self.cache.num_unread(_numbers(running))
        drafted = [
            (group, self.verifier.fitted(draft))
            for group, draft in drafts_of(groups_of(running), self.cost, unread)
        ]
        drafting = laps.lap()
        requests = [request for group, _ in drafted for request in group.requests]
        slots = _numbers(requests)
        emitted: Emitted = []
        with FailAlone(*requests):
            scored = self._score([draft for _, draft in drafted], requests, slots)
            if len(scored) < len(requests):  # some failed; the others propose anew in the next step
                return []
            forward = laps.lap()
            rest, steps = iter(scored), list[tuple[Group, Forest, list[ScoredTree]]]()
            for group, draft in drafted:
                trees = list(islice(rest, len(group.requests)))
                group.accept(trees, self._last_position)
                steps.append((group, draft, trees))
            self.cache.commit([[0, *tree.path] for tree in scored], slots)
            counts, run_by = [len(tree.tokens) for tree in scored], self.verifier.steps_run_by
            for request, padding in zip(requests, self.verifier.num_padding(counts), strict=True):
                request.steps_run_by = run_by
                request.num_padding += padding
            accept, num_nodes = laps.lap(), self.num_nodes + unread
            if self.cost is not None:
                self.cost.record(num_nodes, forward + accept)
            timing = StepTiming(drafting, forward, accept, 0.0, num_nodes, len(requests))
            for group, draft, trees in steps:
                with FailAlone(*group.requests):
                    emitted += group.go_on(draft, trees, timing)
            self.timing = replace(timing, rest=laps.lap())
            for request in requests:
                request.timing = self.timing
        return emitted

    def _score(
        self, drafts: Sequence[Forest], requests: Sequence[Request], slots: Sequence[int]
    ) -> list[ScoredTree]:
        """The scored trees of the requests for which scoring did not fail."""
        if not requests:
            return []
        nodes = Forest.joined(drafts)
        self.num_steps, self.num_nodes = self.num_steps + 1, sum(nodes.counts)

        ranks = max(request.drafter.num_ranks for request in requests if request.drafter)

        def score(first: int, last: int) -> list[ScoredTree]:
            some_nodes = nodes.of_trees(first, last)
            scores = self._with_room(
                lambda: self.verifier.score(self.cache, some_nodes, slots[first:last])
            )
            return read_back(some_nodes, scores, requests[first:last], ranks)

        trees = together_or_alone(score, requests)
        for index, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            if tree is not None and not tree.has_scores(0):
                trees[index] = None
                with FailAlone(request):
                    of_it = nodes.of_trees(index, index + 1)
                    trees[index] = self._root_alone(of_it, request, slots[index], ranks)
        return [tree for tree in trees if tree is not None]

    def _root_alone(self, nodes: Forest, request: Request, slot: int, ranks: int) -> ScoredTree:
        """The tree of these nodes with scores at its root alone, computed anew: draft tokens may
        be to blame for NaN at the root, though it does not see them (`clear_behind`)."""
        self.cache.clear_behind(slot)
        root = Forest.chains([[request.root]], self.verifier.base.device)
        scores = self._with_room(lambda: self.verifier.score(self.cache, root, [slot]))
        (tree,) = read_back(nodes, scores.then_unknown(nodes.counts[0]), [request], ranks)
        return tree

    @property
    def _last_position(self) -> int:
        return self.verifier.base.info.context_length - 1


def _numbers(requests: Sequence[Request]) -> list[int]:
    """Their rows in the cache."""
    return [request.slot.number for request in requests if request.slot is not None]


def _reads_prompts(drafter: Drafter | None) -> bool:
    return drafter is not None and (drafter.reads_prompts or bool(drafter.watches))
