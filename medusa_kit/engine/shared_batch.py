"""Prompts of any number of threads, answered together.

Rows that ask for the same drafter with the same options share one object, and so draft together. It
is built for a full batch and for rows of any sampling, and lives as long as one of them.
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, Unpack
from weakref import WeakValueDictionary, finalize

from medusa_kit.base.model import BaseModel
from medusa_kit.engine.result import GenerationResult
from medusa_kit.engine.streaming import Streaming
from medusa_kit.errors import ConfigError, Live, check_count
from medusa_kit.infer.decode.batches import BatchStats
from medusa_kit.infer.decode.detokenize import StopStrings, TextStream
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import Emission, Request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.decode.text.heard import ThoughtMarks
from medusa_kit.infer.decode.threaded.request_queue import Draining, RequestQueue
from medusa_kit.infer.decode.threaded.submission import OnTokens, Submission
from medusa_kit.infer.details import NOTHING, OutputOptions
from medusa_kit.infer.runners.adapted_verifier import AdaptedVerifier
from medusa_kit.infer.verifier import Verifier
from medusa_kit.locks import KeyedLocks
from medusa_kit.settings.drafters import READ_HEADS
from medusa_kit.settings.drafters import drafter_options as checked_options
from medusa_kit.settings.sampling import SamplingOptions, SamplingParams
from medusa_kit.shown import shown

ANY_SAMPLING = SamplingParams(temperature=1.0)  # which asks most of a drafter


class Requests(Protocol):
    """What an engine makes of prompts (engine.py)."""

    @property
    def base(self) -> BaseModel: ...

    @property
    def verifier(self) -> Verifier: ...

    def request_for(
        self, call: str, prompt: Any, max_new_tokens: int, stop: Any, sampling: SamplingOptions
    ) -> tuple[Request, tuple[str, ...], SamplingParams]: ...

    def drafter_named(
        self, name: str | None, options: Mapping[str, Any] | None
    ) -> tuple[str, Mapping[str, Any] | None]: ...

    def drafter_for(
        self,
        name: str | None,
        options: Mapping[str, Any] | None = None,
        batch_size: int = 1,
        sampling: SamplingParams | None = None,
    ) -> Drafter: ...

    scheduler: Scheduler

    def look_at_heads(self) -> None: ...

    def result_of(self, row: Request, drafter: str, notes: Sequence[str]) -> GenerationResult: ...


class Heads(Protocol):
    """Heads in use: `HeadsLease` of heads_store.py."""

    @property
    def engine(self) -> Requests: ...

    @property
    def number(self) -> int:
        """A number that no other heads have."""
        ...

    def clone(self) -> "Heads":
        """Another lease on these heads, which stay in use until this one is closed, too."""
        ...

    def close(self) -> None: ...


class Answer(Live):
    """An answer under way: wait for its `result`, or read its `stream`. Dropping it cancels it,
    unless it has `on_tokens`."""

    def __init__(
        self,
        submission: Submission,
        drafter: str,
        engine: Requests,
        stops: tuple[str, ...],
        thoughts: ThoughtMarks | None = None,
    ) -> None:
        self.submission = submission
        self.drafter, self._engine, self.stops = drafter, engine, stops  # drafter: its name
        self.thoughts = thoughts

    def result(self) -> GenerationResult:
        """The answer at its end; one that was cancelled is as long as it came to be. Raises what it
        failed of."""
        self.submission.result()
        return self.so_far()

    def so_far(self) -> GenerationResult:
        """The drafter's statistics are those of all rows that shared it, and there at the end."""
        submission = self.submission
        name = submission.drafter_name or self.drafter
        return self._engine.result_of(submission.request, name, submission.drafter_notes)

    def stream(self) -> Streaming:
        """The answer's text as it comes; closing or dropping that cancels the answer."""
        submission = self.submission
        prompt = submission.request.prompt_ids
        tokenizer = self._engine.base.tokenizer
        text = TextStream(tokenizer, self.stops, prompt=prompt, thoughts=self.thoughts)
        return Streaming(
            lambda: ([emission] for emission in submission),
            submission.request,
            text,
            self.so_far,
            self.drafter,
            self.cancel,
        )

    def guessers(self, emission: Emission) -> list[str]:
        """Who drafted the emission's first tokens, those accepted at depth 1, 2, …"""
        return emission.guessers(self.drafter)

    def cancel(self) -> None:
        """End it within a step, from any thread."""
        self.submission.cancel()

    def __del__(self) -> None:
        if self.submission.on_tokens is None:
            self.cancel()


class SharedBatch(Draining):
    """Made by `Engine.shared_batch`. Every method may be called in any thread. One that is dropped
    ends when its answers have."""

    def __init__(
        self,
        engine: Requests,
        max_rows: int,
        most_waiting: int,
        max_pause: float | None,
        watched: Sequence[int] = (),
    ) -> None:
        """`watched`: layers of the base that drafters may read."""
        self._engine, self._max_rows = engine, max_rows
        self._queue = RequestQueue(engine.scheduler, max_rows, max_pause, most_waiting, watched)
        finalize(self, self._queue.drop).atexit = False
        self._drafters: WeakValueDictionary[tuple[int, str, str], Any] = WeakValueDictionary()
        self._building = KeyedLocks()

    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] | None = None,
        drafter: str | None = None,
        drafter_options: Mapping[str, Any] | None = None,
        heads: Heads | None = None,
        on_tokens: OnTokens | None = None,
        wanted: OutputOptions = NOTHING,
        thoughts: ThoughtMarks | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """Let a prompt in, with what `Engine.stream` takes, and return at once.

        `heads`: from a `HeadsStore` of this engine, in place of its own; they stay in use until the
        answer has ended, whatever the caller does with its own hold on them.
        `on_tokens` is called in the batch's thread with the tokens of each step, and at the end
        with none: it should only pass them on, as by `loop.call_soon_threadsafe`.
        `wanted`: what is reported of each step besides (`Submission.take`).
        `thoughts`: before the answer's words, in which stop strings do not count.
        Raises what `Engine.stream` does, QueueFullError where too many wait, ClosedError after
        `close`.
        """
        if on_tokens is not None and not callable(on_tokens):
            raise ConfigError(
                f"on_tokens {on_tokens!r} cannot be called; expected a function",
                hint="it is called with the tokens of each step",
            )
        if isinstance(drafter, Drafter):
            raise ConfigError(
                "a shared batch takes a drafter by its name",
                hint="register yours under a name (docs/drafters.md), or call Engine.generate",
            )
        engine = self._engine if heads is None else self._engine_of(heads)
        name, options = engine.drafter_named(drafter, drafter_options)
        if not (isinstance(engine.verifier, AdaptedVerifier) or name in READ_HEADS):
            engine, heads = self._engine, None
        try:
            row, stops, _ = engine.request_for("submit", prompt, max_new_tokens, stop, sampling)
        except RuntimeError as error:
            self._queue.check_device(error)
            raise
        row.output_options = wanted
        if thoughts is not None and stops:
            row.stop_strings = StopStrings(engine.base.tokenizer, stops, thoughts)
        if heads is None:
            submission = self._queue.submit(row, self._drafter(name, options), on_tokens)
        else:
            lease = heads.clone()
            try:
                built = self._drafter(name, options, lease)
                submission = self._queue.submit(row, built, on_tokens, lease.close)
            except BaseException:
                lease.close()
                raise
        return Answer(submission, name, self._engine, stops, thoughts)

    def generate(self, prompt: Any, **options: Any) -> GenerationResult:
        """The answer to one prompt; `options` as for `submit`."""
        return self.submit(prompt, **options).result()

    def stream(self, prompt: Any, **options: Any) -> Streaming:
        """The text of one answer as it comes; `options` as for `submit`."""
        return self.submit(prompt, **options).stream()

    @property
    def stats(self) -> BatchStats:
        """How many prompts are answered, read and waiting, and what the last step was."""
        return self._queue.stats

    @property
    def ended(self) -> str | None:
        """Why no more prompts are taken, or None."""
        return self._queue.ended

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more prompts, and wait until the answers under way have ended (`drain`) or have
        been cancelled, for so many seconds at most."""
        self._queue.close(drain, timeout)

    def _engine_of(self, heads: Heads) -> Requests:
        if not hasattr(heads, "engine"):
            raise ConfigError(
                f"heads {heads!r} are of type {type(heads).__name__}; expected heads in use",
                hint="take them from a HeadsStore: heads=store.get(NAME)",
            )
        verifier = heads.engine.verifier
        plain = verifier.plain if isinstance(verifier, AdaptedVerifier) else verifier
        if plain is not self._engine.verifier:
            raise ConfigError(
                "these heads were loaded for another engine's base model",
                hint="take them from a HeadsStore of the engine that this batch belongs to",
            )
        return heads.engine

    def _drafter(
        self, name: str, options: Mapping[str, Any] | None, heads: Heads | None = None
    ) -> Drafter:
        """The drafter that rows in the batch use already, if there is one with these options and
        heads."""
        engine, number = (self._engine, 0) if heads is None else (heads.engine, heads.number)
        key = number, name, checked_options(name, options).model_dump_json()
        with self._building.of(key):  # requests with other drafters go on meanwhile
            drafter: Drafter | None = self._drafters.get(key)
            if drafter is not None:
                engine.look_at_heads()
            else:
                drafter = engine.drafter_for(name, options, self._max_rows, ANY_SAMPLING)
                self._drafters[key] = drafter
            return drafter


def check_options(max_rows: int, most_waiting: int, max_pause: float | None) -> None:
    """Raises ConfigError for numbers that a batch cannot have."""
    check_count("max_rows", max_rows)
    if most_waiting != 0:
        check_count("most_waiting", most_waiting)
    number = isinstance(max_pause, Real) and not isinstance(max_pause, bool)
    if max_pause is not None and not (number and max_pause > 0):
        raise ConfigError(
            f"max_pause {shown(max_pause)} is out of range; expected seconds above 0, or None",
            hint="0.1 lets answers wait for a tenth of a second; None until prompts are read",
        )
