"""From answers under way to what is sent: one JSON object, or server-sent events.

`Reply` says how; chats and completions each have their own.
"""

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from medusa_kit.engine.result import GenerationResult
from medusa_kit.engine.shared_batch import Answer
from medusa_kit.infer.decode.detokenize import Settled, TextStream
from medusa_kit.infer.decode.request import Emission
from medusa_kit.infer.details import TokenScore, VerifiedTree
from medusa_kit.serve.calls.reading import NO_READING, Reading
from medusa_kit.serve.calls.tools import UNCONSTRAINED, Constraint
from medusa_kit.serve.deadline import Deadline
from medusa_kit.serve.errors import described
from medusa_kit.serve.logprobs import Scored, ScoredText, text_of_token
from medusa_kit.serve.schema import Request
from medusa_kit.serve.service import Answers, Prompts, Service
from medusa_kit.version import __version__

T = TypeVar("T")
NOT_HELD_BACK = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # by caches, nginx
FINGERPRINT = f"medusa-kit-{__version__}"
CLIENT_GONE = 499  # as nginx has it; nobody reads it


@dataclass
class Piece:
    """What a step added to an answer. `spans`: the text by who drafted it."""

    text: str = ""
    spans: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)  # whose text is in `text`
    tree: VerifiedTree | None = None

    def add(self, other: "Piece") -> None:
        self.text += other.text
        self.spans += other.spans
        self.tokens += other.tokens
        self.scored += other.scored
        self.tree = other.tree or self.tree


class AnswerText:
    """The text of one answer, step by step. Its stop token is no part of it."""

    def __init__(
        self, answer: Answer, tokenizer: Any, reading: Reading = NO_READING, reads: bool = True
    ) -> None:
        """`reading`: what its tags are for, which may be special tokens; other such tokens are no
        text. `reads`: else there is no text, spans and scores, and only tokens are returned."""
        self._answer, self._tokenizer = answer, tokenizer
        keeps = reading.keeps_special(tokenizer)
        self._dropped = reading.dropped(tokenizer) if keeps else frozenset[int]()
        prompt = answer.submission.request.prompt_ids
        stops, thoughts = answer.stops, answer.thoughts
        self._text = TextStream(tokenizer, stops, keeps, prompt, thoughts) if reads else None
        self._scored = ScoredText(tokenizer, self._dropped if keeps else None, prompt)
        self._scores: deque[TokenScore] = deque()  # of tokens whose text has not settled
        self._last: tuple[int, str | None] = (0, None)
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._shown)

    def push(self, emission: Emission) -> Piece:
        piece, request = Piece(tree=emission.tree), self._answer.submission.request
        guessers = self._answer.guessers(emission)
        for index, token in enumerate(emission.tokens):
            guessed = index < len(guessers)
            self._last = (index + 1, guessers[index]) if guessed else (0, None)
            if token in request.stop_ids:
                continue
            piece.tokens.append(token)
            if emission.scores is not None:
                self._scores.append(emission.scores[index])
            if self._text is not None:
                self._show(piece, self._text.settle([token]))
        return piece

    def finish(self) -> Piece:
        piece = Piece()
        if self._text is not None:
            self._show(piece, self._text.settle_all())
        return piece

    def _show(self, piece: Piece, settled_tokens: Sequence[Settled]) -> None:
        settled_tokens = [self._without_dropped(settled) for settled in settled_tokens]
        for settled in settled_tokens:
            if self._scores:
                scores = [self._scores.popleft() for _ in settled.tokens]
                piece.scored += self._scored.read(settled, scores)
        if text := "".join(settled.text for settled in settled_tokens):
            depth, by = self._last
            piece.text += text
            self._shown.append(text)
            piece.spans.append({"text": text, "depth": depth, "by": by})

    def _without_dropped(self, settled: Settled) -> Settled:
        text = settled.text
        for token in self._dropped.intersection(settled.tokens):
            text = text.replace(self._tokenizer.convert_ids_to_tokens(token), "")
        return settled._replace(text=text)


class Reply(ABC):
    """The answers to one request in the words of OpenAI's API."""

    whole_name: str
    chunk_name: str
    prefix: str

    def __init__(
        self, service: Service, request: Request, constraint: Constraint = UNCONSTRAINED
    ) -> None:
        self.service, self.request, self.constraint = service, request, constraint
        self.tokenizer = service.engine.base.tokenizer
        self.reading = NO_READING
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.requested_model(request).name,
            "system_fingerprint": FINGERPRINT,
        }
        if request.service_tier is not None:
            self._head["service_tier"] = "default"  # there is one

    @abstractmethod
    def choice(self, index: int, piece: Piece, reason: str) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of an answer before its text."""

    @abstractmethod
    def delta(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """What a step added; `reason`: at the end, why."""

    def whole(self, choices: Sequence[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.whole_name, "choices": list(choices), "usage": used}

    def event(self, choices: Sequence[dict[str, Any]], used: Any = None) -> bytes:
        content = {**self._head, "object": self.chunk_name, "choices": list(choices)}
        if self.request.wants_usage:
            content["usage"] = used
        return sse_event(content)

    def extras(self, piece: Piece) -> dict[str, Any]:
        """Further fields that the request asked for."""
        extras: dict[str, Any] = {}
        fields, reported = self.request.medusa_kit, dict[str, Any]()
        if fields.spans:
            reported["spans"] = piece.spans
        if fields.tree:
            reported["tree"] = None if piece.tree is None else self._tree(piece.tree)
        if reported:
            extras["medusa_kit"] = reported
        if self.request.return_token_ids:
            extras["token_ids"] = piece.tokens
        return extras

    def _tree(self, tree: VerifiedTree) -> dict[str, Any]:
        """A step's tree with the texts of its tokens, since clients have no tokenizer."""
        texts = [text_of_token(self.tokenizer, token) for token in tree.tokens]
        return {**tree._asdict(), "texts": texts}


def usage(
    results: Sequence[GenerationResult], answers_each: int, heads: str | None
) -> dict[str, Any]:
    """The `usage` of all answers to a request; each prompt counts once, however many answers it
    got. `heads`: those that it named, or the server's own."""
    stats = [result.stats for result in results]
    prompts = stats[::answers_each]
    prompt = sum(answer.prompt_tokens for answer in prompts)
    new, steps = (
        sum(answer.new_tokens for answer in stats),
        sum(answer.num_steps for answer in stats),
    )
    cached = sum(answer.cached_tokens for answer in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
        "medusa_kit": {
            "acceptance_length": (new - len(stats)) / steps if steps else 1.0,
            "cached_tokens": cached,
            "steps": steps,
            "drafter": stats[0].drafter,
            "heads": heads,
        },
    }


def sse_event(content: dict[str, Any]) -> bytes:
    # In ASCII, since some clients take U+2028 and the like for the end of a line.
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class EventStream(StreamingResponse):
    """Ends the answers whatever becomes of the connection."""

    def __init__(self, answers: Answers, content: AsyncIterator[bytes]) -> None:
        super().__init__(content, media_type="text/event-stream", headers=NOT_HELD_BACK)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


async def respond(
    reply: Reply, prompts: Prompts, http: HttpRequest, deadline: Deadline | None = None
) -> Response:
    """Answer a request, which began before the call if it has a deadline. Raises what cannot be
    answered."""
    if reply.request.store:
        http.state.notes = [*getattr(http.state, "notes", ()), "store: true has no effect"]
    owner = http.headers.get("authorization", "")
    answers = await reply.service.ask(reply.request, prompts, reply.constraint, owner, deadline)
    if answers.chat is not None:
        reply.reading = answers.chat.reading
    if reply.request.stream:
        return EventStream(answers, _events(reply, answers))
    try:
        content = await unless_gone(http, _whole(reply, answers))
    finally:
        answers.cancel()
    return Response(status_code=CLIENT_GONE) if content is None else JSONResponse(content)


async def _events(reply: Reply, answers: Answers) -> AsyncIterator[bytes]:
    texts = [AnswerText(answer, reply.tokenizer, reply.reading) for answer in answers.answers]
    try:
        openings = (reply.opening(index) for index in range(len(texts)))
        for opening in openings:
            if opening is not None:
                yield reply.event([opening])
        async for index, emission in answers.steps():
            if emission is not None:
                piece = texts[index].push(emission)
                if piece.tokens or piece.tree is not None:
                    yield reply.event([reply.delta(index, piece, None)])
                continue
            reason, last = (
                answers.answers[index].submission.request.finish_reason,
                texts[index].finish(),
            )
            answers.keep(index, texts[index].text)  # before the client can go on from it
            yield reply.event([reply.delta(index, last, reason)])
        if reply.request.wants_usage:
            yield reply.event([], usage(answers.results(), reply.request.n, answers.drafting_heads))
        yield b"data: [DONE]\n\n"
    except Exception as error:  # the status has been sent, so the error is an event
        yield sse_event(described(error)[1])


async def _whole(reply: Reply, answers: Answers) -> dict[str, Any]:
    request = reply.request  # unless it wants more than text, that is decoded once, at the end
    in_tags = reply.reading.keeps_special(reply.tokenizer)
    reads = in_tags or request.medusa_kit.spans or request.num_top_tokens is not None
    texts = [
        AnswerText(answer, reply.tokenizer, reply.reading, reads) for answer in answers.answers
    ]
    pieces = [Piece() for _ in texts]
    async for index, emission in answers.steps():
        added = texts[index].finish() if emission is None else texts[index].push(emission)
        pieces[index].add(added)
    results = answers.results()
    for index, result in enumerate(results):
        pieces[index].text = texts[index].text if in_tags else result.text
        answers.keep(index, pieces[index].text)
    finished = enumerate(zip(pieces, results, strict=True))
    choices = [
        reply.choice(index, piece, result.finish_reason) for index, (piece, result) in finished
    ]
    return reply.whole(choices, usage(results, reply.request.n, answers.drafting_heads))


async def unless_gone(http: HttpRequest, work: Awaitable[T]) -> T | None:
    """What `work` returns, or None where the client hangs up before."""

    async def disconnected() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def service_of(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service
