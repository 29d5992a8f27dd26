"""The engine behind the routes: who may be asked for, and answers as they come, for asyncio.

A request may ask for several answers. They share one event that the batch's thread sets.
"""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from medusa_kit.background import in_background
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.engine.recent_turns import RecentTurns
from medusa_kit.engine.result import GenerationResult
from medusa_kit.engine.shared_batch import Answer
from medusa_kit.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    HubError,
    IncompatibleBaseError,
    MedusaKitError,
    StorageError,
    UnknownModelError,
    UsageError,
)
from medusa_kit.infer.decode.accept.grammar import prepare_grammars
from medusa_kit.infer.decode.batches import BatchStats
from medusa_kit.infer.decode.request import Emission
from medusa_kit.infer.decode.request import Request as DecodedRequest
from medusa_kit.infer.details import OutputOptions
from medusa_kit.serve.calls.call_grammar import behind_reasoning
from medusa_kit.serve.calls.tools import UNCONSTRAINED, Constraint
from medusa_kit.serve.constraints import Constraints
from medusa_kit.serve.conversations import ChatPrompt, Conversations
from medusa_kit.serve.deadline import Deadline, Threads
from medusa_kit.serve.drafting import check_drafting
from medusa_kit.serve.errors import NoSuchModelError, RequestError, ServerClosingError, field_of
from medusa_kit.serve.hints import hint_for_client
from medusa_kit.serve.models import ModelNames, RequestedModel, ServedModels, base_name, own_heads
from medusa_kit.serve.operations.acceptance import ServedAcceptance
from medusa_kit.serve.operations.metrics import AnswerClock, Metrics
from medusa_kit.serve.operations.open_files import import_all
from medusa_kit.serve.prompts import encode_prompts
from medusa_kit.serve.recording import Recorder
from medusa_kit.serve.schema import Request
from medusa_kit.settings.serve import ServeConfig

T = TypeVar("T")
WINDOW = 5.0  # seconds over which tokens/s are counted
THREADS = 8  # of a kind


Prompts = Sequence[str | list[int] | list[dict[str, Any]]]


class Step(NamedTuple):
    """What a step added to one of a request's answers; the last one of each has no emission."""

    number: int  # of the answer
    emission: Emission | None


class Answers:
    """The answers to one request, under way. Whoever makes them must `cancel` them at the end."""

    def __init__(
        self,
        service: "Service",
        deadline: Deadline,
        stream: bool = True,
        heads: str | None = None,
        grammar_field: str | None = None,
        owner: str = "",
    ) -> None:
        """`stream`: whether each step is waited for, or the end alone. `heads`: that the request
        named. `grammar_field`: which asks for a grammar."""
        self._service, self._stream = service, stream
        self.heads, self._grammar_field, self.owner = heads, grammar_field, owner
        self.drafting_heads = own_heads(service.engine) if heads is None else heads
        self.chat: ChatPrompt | None = None  # unless it is no chat
        self._changed = asyncio.Event()
        self.answers: list[Answer] = []
        self._cancelled = False
        self._clocks: list[AnswerClock] = []
        self.deadline, self._loop = deadline, deadline.loop

    def _on_tokens(self, clock: AnswerClock, tokens: list[int]) -> None:
        """Note a step's tokens, none at the end. Called in the batch's thread."""
        clock.stamp(len(tokens))
        self._service.count(len(tokens))
        if self._cancelled and not tokens:  # its last step came after `cancel`
            self._count_unread()
        if self._stream or not tokens:
            self._loop.call_soon_threadsafe(self._changed.set)

    def submit(self, **options: Any) -> None:
        clock = self._service.metrics.answer(self.deadline.began)
        on_tokens = partial(self._on_tokens, clock)
        try:
            answer = self._service.batch.submit(on_tokens=on_tokens, **options)
        except ConfigError as error:
            raise self._explained(error) from error
        self.answers.append(answer)
        self._clocks.append(clock)
        if self._cancelled:  # while a thread still let it in
            self.cancel()

    async def steps(self) -> AsyncIterator[Step]:
        """The steps of all answers as they come. Raises what an answer failed of,
        RequestTimeoutError."""
        open_ = dict(enumerate(self.answers))
        while open_:
            self._changed.clear()
            if self._cancelled:  # by the server: a client that hangs up reads no more
                raise ServerClosingError("the server is closing", code="closing")
            for index, answer in list(open_.items()):
                done = answer.submission.done  # read first: nothing is emitted after it
                for emission in answer.submission.take():
                    self._clocks[index].accepted(len(emission.tokens), emission.num_guessed)
                    yield Step(index, emission)
                self._clocks[index].settle()
                if done:
                    del open_[index]
                    if (error := answer.submission.error) is not None:
                        raise self._explained(error)
                    request, clock = answer.submission.request, self._clocks[index]
                    self._service.record(request)
                    clock.prompt(len(request.prompt_ids), request.num_cached)
                    clock.end(answer.drafter, self.heads, len(request.token_ids), request.num_steps)
                    self._service.acceptance.add(answer.drafter, self.heads, request)
                    yield Step(index, None)
            if open_:
                await self.deadline.wait(self._changed.wait())

    def _explained(self, error: Exception) -> Exception:
        """A grammar that this base cannot follow to its end is the request's."""
        if type(error) is ConfigError:
            message = self._service.without_path(error.message)
            error = error if message == error.message else ConfigError(message, hint=error.hint)
        if (
            self._grammar_field is None
            or not isinstance(error, MedusaKitError)
            or type(error) not in (ConfigError, MedusaKitError)
            or field_of(error) is not None
        ):
            return error
        return RequestError(error.message, hint=hint_for_client(error), param=self._grammar_field)

    def keep(self, number: int, text: str) -> None:
        """Keep an answer of a chat that has ended, for the turn after it."""
        if self.chat is not None:
            request = self.answers[number].submission.request
            ids = [token for token in request.token_ids if token not in request.stop_ids]
            self._service.conversations.keep(self.chat, text, ids)

    def _count_unread(self) -> None:
        """Count tokens that nobody reads any more: they have been decoded all the same."""
        for answer, clock in zip(list(self.answers), list(self._clocks), strict=False):
            for emission in answer.submission.take():
                clock.accepted(len(emission.tokens), emission.num_guessed)
            clock.settle()

    def results(self) -> list[GenerationResult]:
        return [answer.so_far() for answer in self.answers]

    def cancel(self) -> None:
        """End those that have not ended, within a step."""
        self._cancelled = True
        for answer in list(self.answers):
            answer.cancel()
        self._count_unread()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._changed.set)
        self._service.leave(self)


class Service:
    """An engine, its shared batch, and what a request may ask of them."""

    def __init__(
        self, engine: Engine, config: ServeConfig, names: ModelNames | None = None
    ) -> None:
        import_all()
        self.engine, self.config = engine, config
        self.heads = _heads_store(engine, config)
        self.started = int(time.time())
        called = config.names_of(base_name(engine.base.info))
        self.name = called[0]
        self.names: ModelNames = names or ServedModels(engine, called, self.heads, self.started)
        # Refused before there is a batch to end.
        self._recorder = (
            None
            if config.record is None
            else Recorder(config.record, engine.base, engine.activations)
        )
        self.batch = engine.shared_batch(config.max_rows, config.max_queue, config.max_pause)
        self.acceptance = ServedAcceptance(engine.plan)
        self.metrics = Metrics(lambda: self.stats, self.heads, self.acceptance)
        self.closing = False  # no new requests are taken
        kept = RecentTurns() if engine.scheduler.reuse_prefixes else None
        self.conversations = Conversations(engine.base.tokenizer, kept)
        self.constraints = Constraints(lambda: self.closing)
        self._threads = Threads(THREADS)  # that encode prompts
        self._disk = Threads(THREADS)  # that look at the folders of heads
        self._under_way: set[Answers] = set()
        self._recent: deque[tuple[float, int]] = deque(maxlen=4096)  # (time, tokens) of steps

    @property
    def idle(self) -> bool:
        return not self._under_way

    def not_ready(self) -> str | None:
        """Why requests cannot be answered now."""
        return "closing" if self.closing else "failed" if self.failed else None

    @property
    def failed(self) -> str | None:
        """Why no request can be answered any more, unless the server closes."""
        return None if self.closing else self.batch.ended

    @property
    def stats(self) -> BatchStats:
        return self.batch.stats

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all answers, over the last few seconds."""
        since = time.monotonic() - WINDOW
        return sum(tokens for when, tokens in list(self._recent) if when > since) / WINDOW

    def count(self, tokens: int) -> None:
        self._recent.append((time.monotonic(), tokens))

    def record(self, request: DecodedRequest) -> None:
        """Record an answer that has ended, where the server does."""
        if self._recorder is not None:
            self._recorder.add(request)

    def prepare(self) -> None:
        """Make ready what a request with a schema needs, in the background."""
        base = self.engine.base
        self.constraints.start()
        in_background(prepare_grammars, base.tokenizer, base.info.vocab_size, base.stop_token_ids)

    def deadline(self) -> Deadline:
        """The deadline of a request that begins now."""
        return Deadline(self.config.request_timeout)

    async def read(self, work: Callable[..., T], *args: Any) -> T:
        """What `work`, which reads the disk, returns in time. Raises RequestTimeoutError."""
        return await self.deadline().wait(self._disk.run(work, *args))

    def without_path(self, message: str) -> str:
        """A message for clients, which need not know where the base is."""
        name = self.engine.base.info.name
        return message.replace(name, self.name) if Path(name).name else message

    def requested_model(self, request: Request) -> RequestedModel:
        """The model that a request names. Raises RequestError."""
        with self._blamed(request):
            return self.names.requested(request.model, request.adapter_id, request.adapter_source)

    async def ask(
        self,
        request: Request,
        prompts: Prompts,
        constraint: Constraint = UNCONSTRAINED,
        owner: str = "",
        deadline: Deadline | None = None,
    ) -> Answers:
        """Let `n` answers to each prompt in; answer i of a prompt is that of seed + i. `owner`:
        whose earlier turns a chat may go on from; `deadline`: None: it begins now."""
        if self.closing:
            raise ServerClosingError("the server is closing", code="closing")
        self._check_number(request, prompts)
        heads, deadline = self.requested_model(request).heads, deadline or self.deadline()
        answers = Answers(self, deadline, request.stream, heads, constraint.field, owner)
        self._under_way.add(answers)
        try:
            await self._let_in(answers, request, prompts, constraint)
        except BaseException:
            answers.cancel()
            raise
        return answers

    def _check_number(self, request: Request, prompts: Prompts) -> None:
        """Raises RequestError for more answers than the queue can ever hold."""
        num_answers = len(prompts) * request.n
        max_answers = self.config.max_rows + self.config.max_queue
        if num_answers > max_answers:
            prompted = f"{len(prompts)} prompts with n {request.n}" if len(prompts) > 1 else "n"
            raise RequestError(
                f"{prompted} asks for {num_answers} answers; this server takes {max_answers} at "
                "most at a time",
                param="n" if len(prompts) == 1 else "prompt",
                hint="ask for them in several requests",
            )

    async def _let_in(
        self, answers: Answers, request: Request, prompts: Prompts, constraint: Constraint
    ) -> None:
        with self._blamed(request):
            named = await answers.deadline.wait(
                self.names.ready(request.model, request.adapter_id, request.adapter_source)
            )
        submit = self._threads.run(self._submit, answers, request, prompts, constraint, named)
        try:
            await answers.deadline.wait(submit)
        finally:
            if (heads := named.get("heads")) is not None:
                heads.close()  # the answers have holds of their own

    @contextlib.contextmanager
    def _blamed(self, request: Request) -> Iterator[None]:
        """What is wrong with the model or heads that a request names is the fault of the field that
        names them."""
        try:
            yield
        except (HubError, StorageError):  # which may have been out of reach
            raise
        except (UsageError, CheckpointError, IncompatibleBaseError) as error:
            named = "model" if request.adapter_id is None else "adapter_id"
            message, hint = self.without_path(error.message), hint_for_client(error)
            if isinstance(error, UnknownModelError):
                raise NoSuchModelError(
                    message, hint=hint, param=named, code="model_not_found"
                ) from error
            raise RequestError(message, hint=hint, param=field_of(error) or named) from error

    def leave(self, answers: Answers) -> None:
        self._under_way.discard(answers)

    def cancel(self) -> None:
        """End all that is under way, and take no more."""
        self.closing = True
        for answers in list(self._under_way):
            answers.cancel()

    def close(self, drain: bool) -> None:
        self.closing = True
        self.constraints.close()
        if self.heads is not None:
            self.heads.close()
        self.batch.close(drain, self.config.drain_timeout)
        if self._recorder is not None:
            self._recorder.close()

    def _submit(
        self,
        answers: Answers,
        request: Request,
        prompts: Sequence[Any],
        constraint: Constraint,
        named: Mapping[str, Any],
    ) -> None:
        kit_fields = request.medusa_kit
        check_drafting(kit_fields)
        options: dict[str, Any] = {
            "stop": request.stop,
            "wanted": OutputOptions(request.num_top_tokens, kit_fields.tree),
            **request.sampling(self.engine.base.generation_config),
            **named,
        }
        if kit_fields.drafter is not None or kit_fields.drafter_options is not None:
            options |= {
                "drafter": kit_fields.drafter,
                "drafter_options": kit_fields.drafter_options,
            }
        seed = secrets.randbits(31) if request.seed is None else request.seed
        encoded, answers.chat = encode_prompts(
            self.engine, self.conversations, prompts, constraint, answers.owner
        )
        reasoning = None if answers.chat is None else answers.chat.reading.reasoning
        options["grammar"] = behind_reasoning(constraint.grammar, reasoning)
        if reasoning is not None:
            options["thoughts"] = reasoning.in_text
        for ids in encoded:
            longest = self._longest(len(ids), request)
            for number in range(request.n):
                answers.submit(prompt=ids, max_new_tokens=longest, seed=seed + number, **options)

    def _longest(self, num_prompt: int, request: Request) -> int:
        """How many tokens an answer may have. Raises ContextLengthError for more than there is room
        for; where none are asked for, the rest of the context will do."""
        context = self.engine.base.info.context_length
        if (requested := request.longest) is None:
            return self.config.default_max_tokens
        if request.gives_length and num_prompt + requested > context:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and max_tokens is {requested}; the model's "
                f"context holds {context}, answer included",
                hint="shorten the prompt, or ask for fewer tokens",
            )
        return requested


def _heads_store(engine: Engine, config: ServeConfig) -> HeadsStore | None:
    if config.heads_dir is None and not config.heads_hub:
        return None
    return HeadsStore(engine, config.heads_dir, config.heads_hub or (), config.heads_bytes)
