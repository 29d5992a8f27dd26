"""One request and its state while it is decoded."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.base.tokenizer.ids import check_stop_ids, check_token_ids
from medusa_kit.errors import ConfigError, ContextLengthError, Live, check_count
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.decode.accept.grammar import grammar_mask
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.detokenize import StopPosition, StopStrings
from medusa_kit.infer.decode.drafter import Drafter, RequestText
from medusa_kit.infer.decode.slots import Slot
from medusa_kit.infer.decode.timing import StepTiming
from medusa_kit.infer.details import NOTHING, OutputOptions, TokenScore, VerifiedTree
from medusa_kit.infer.outputs import TextStates
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.sampling import SamplingParams

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Request(RequestText, Live):
    """One request while it is decoded: its prompt and options, what it emitted, how steps went.

    `seconds`: from when it was given a slot until its last token; `first_seconds`: its first.
    """

    prompt_ids: list[int]
    sampler: Sampler
    max_new_tokens: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    error: Exception | None = None  # what it failed of
    num_steps: int = 0
    num_nodes: int = 0  # that its steps verified for it, roots included
    num_together: int = 0  # requests of these steps, itself included
    depth_counts: dict[int, int] = field(default_factory=dict)  # accepted depth -> steps
    # Of steps with a draft: (who drafted, None: its drafter; nodes, accepted depth) -> steps.
    drafted_steps: dict[tuple[str | None, int, int], int] = field(default_factory=dict)
    first_scores: list[TokenScore] | None = None  # of the first token, where they are requested
    num_guessed: int = 0  # of the newest step's tokens: these came first, from a drafter
    output_options: OutputOptions = NOTHING
    scores: list[TokenScore] | None = None  # of the newest step's tokens, where requested
    token_scores: list[TokenScore] = field(default_factory=list)  # of all tokens, where kept
    tree: VerifiedTree | None = None  # of the newest step, where it is requested
    timing: StepTiming | None = None  # of the newest step that verified its tree
    steps_run_by: str = "torch"
    attention: AttentionChoice | None = None  # of its steps, once there are any
    rounding_tolerance: float = 0.0  # a smaller margin between the likeliest tokens is a near-tie
    near_ties: int = 0  # of tokens chosen after a prompt part of which an earlier request had read
    num_cached: int = 0  # first tokens of the prompt that an earlier request had left in the cache
    num_padding: int = 0  # nodes that were computed for nothing, since another request had more
    seconds: float = 0.0
    first_seconds: float = 0.0
    verifier: Verifier | None = None  # that decodes it; None: its batch's
    caller: Any = None  # who waits for it (Caller)
    has_emitted: bool = False  # whether its first token was handed out
    is_abandoned: bool = False  # whether nobody did any more
    drafter: Drafter | None = None  # that drafts for it; None before a batch has it
    slot: Slot | None = None  # in the KV cache, from when its prompt is read until it leaves
    num_read: int = 0  # first tokens of its prompt that are cached, or are read now
    prompt_parts: list[TextStates] = field(default_factory=list, repr=False)  # as read
    _started: float | None = None

    @property
    def num_positions(self) -> int:
        """Tokens that it may come to have."""
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def stop_position(self) -> StopPosition | None:
        """Where the answer's text ends, if a stop string ended it."""
        return None if self.stop_strings is None else self.stop_strings.position

    def begin(self, attention: AttentionChoice) -> None:
        """Start the clock: the request has got a slot, and its prompt is read next."""
        self.attention = attention
        self._started = time.perf_counter()

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Emit tokens up to the first stop; what follows is dropped. Returns those emitted."""
        if self._started is not None:
            self.seconds = time.perf_counter() - self._started
            self.first_seconds = self.first_seconds or self.seconds
        for count, token in enumerate(tokens, start=1):
            self.token_ids.append(token)
            if token in self.stop_ids or (self.stop_strings and self.stop_strings.push(token)):
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return list(tokens[:count])
        return list(tokens)

    def cancel(self) -> None:
        """End it here; it keeps what it has emitted."""
        self.finish_reason = self.finish_reason or "cancelled"

    def fail(self, error: Exception) -> None:
        """End it here, unless it has ended; `error` is why."""
        if is_out_of_memory(error):
            error.__traceback__ = None  # its frames hold tensors
        if self.finish_reason is None:
            self.finish_reason, self.error = "error", error

    def forget(self) -> None:
        """Free what it and its drafter keep for further steps, now that there is none."""
        self.kept.clear()
        self.prompt_parts = []
        self.hidden_ND = self.prompt_hidden = self.prompt_layers = None

    def text_ids(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that belong to the answer's text: all but the stop tokens."""
        return [token for token in tokens if token not in self.stop_ids]

    @property
    def counts_near_ties(self) -> bool:
        """Whether rounding may have decided tokens, since part of the prompt was not read anew. A
        draw has margins of its own."""
        return self.num_cached > 0 and self.sampler.takes_argmax

    def count_step(
        self, num_emitted: int, path_length: int, num_nodes: int = 0, num_requests: int = 0
    ) -> None:
        """Add a step to this request's counts. `num_nodes`: verified for this request;
        `num_requests`: that shared the step. Of a step that was cut, only accepted nodes that were
        emitted count."""
        depth = min(num_emitted, path_length)
        self.num_steps += 1
        self.num_nodes += num_nodes
        self.num_together += num_requests
        self.num_guessed = depth
        self.depth_counts[depth] = self.depth_counts.get(depth, 0) + 1
        if num_nodes > 1:
            draft = (self.drafted_by, num_nodes, depth)
            self.drafted_steps[draft] = self.drafted_steps.get(draft, 0) + 1


Emitted = list[tuple[Request, list[int]]]


class Emission(NamedTuple):
    """What a step emitted of a request. The first `num_guessed` tokens came from its drafter;
    `credits`: from which of its sources, where it has several. `scores`, `tree`: where the request
    wants them."""

    tokens: list[int]
    num_guessed: int = 0
    credits: list[str] | None = None
    scores: list[TokenScore] | None = None
    tree: VerifiedTree | None = None

    def guessers(self, drafter: str) -> list[str]:
        """Who drafted the tokens accepted at depth 1, 2, …; `drafter`: where it has no several
        sources."""
        known, count = self.credits, self.num_guessed
        return [drafter] * count if known is None else known[:count]


def emission(request: Request, tokens: list[int]) -> Emission:
    """What was just emitted, with what the request has of it until its next step."""
    if not request.has_emitted:  # it may have made its first step in the same one of the batch
        request.has_emitted = True
        return Emission(tokens, scores=request.first_scores)
    return Emission(tokens, request.num_guessed, request.credits, request.scores, request.tree)


class FailAlone:
    """`with FailAlone(*requests)`: what is raised inside ends these, and goes no further."""

    def __init__(self, *requests: Request) -> None:
        self._requests = requests

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        for request in self._requests:
            request.fail(error)
        return True


def together_or_alone(
    work: Callable[[int, int], Sequence[T]], requests: Sequence[Request]
) -> list[T | None]:
    """`work(first, last)`: something for each request from `first` to before `last`. Where it fails
    for all of them, it is called for each alone; those for which it fails then have failed, and
    None is returned for them. It must be possible to call it again after a failure."""
    if len(requests) > 1:
        try:
            return list(work(0, len(requests)))
        except Exception as error:
            error.__traceback__ = None  # its frames hold tensors, which the next calls may need
    done: list[T | None] = [None] * len(requests)
    for index, request in enumerate(requests):
        with FailAlone(request):
            (done[index],) = work(index, index + 1)
    return done


def make_request(
    verifier: Verifier,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    max_new_tokens: int,
    stop_strings: StopStrings | None = None,
) -> Request:
    """A request ready to decode. `max_new_tokens` is reduced to what the context holds.

    Raises ContextLengthError for a prompt that fills the context, ConfigError for an empty one, for
    an id that the model has no row for and for a grammar that cannot be followed,
    IncompatibleBaseError for a model that somebody has moved to the meta device.
    """
    base = verifier.base
    base.check_output()
    context = base.info.context_length
    check_count("max_new_tokens", max_new_tokens)
    if not prompt_ids:
        raise ConfigError("the prompt has no token", hint="give some text")
    check_token_ids(prompt_ids, base.info.vocab_size)
    check_stop_ids(base.stop_token_ids, base.info.vocab_size)
    if len(prompt_ids) >= context:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens; the model's context holds {context}, "
            "answer included",
            hint="shorten the prompt",
        )
    mask = None
    if sampling.grammar is not None:
        num_logits, stops = base.info.vocab_size, base.stop_token_ids
        mask = grammar_mask(sampling.grammar, base.tokenizer, num_logits, stops, len(prompt_ids))
    return Request(
        prompt_ids=list(prompt_ids),
        sampler=Sampler(base, sampling, prompt_ids, max_new_tokens, mask=mask),
        max_new_tokens=min(max_new_tokens, context - len(prompt_ids)),
        stop_ids=base.stop_token_ids,
        stop_strings=stop_strings,
        verifier=verifier,
    )
