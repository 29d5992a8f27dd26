"""One chat completion as a server streams it, piece by piece, with its times.

The stream is server-sent events: lines `data: {...}`, the last one `data: [DONE]`. A server that
sends the whole answer instead is read too, without a time to first token.
"""

import http.client
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from medusa_kit.data.readers import Message
from medusa_kit.distill.openai_client import Endpoint
from medusa_kit.errors import DataError
from medusa_kit.files import parse_json

EVENT_STREAM = "text/event-stream"
TEXT_PARTS = ("content", "reasoning_content", "reasoning")  # of a delta; all of it is decoded
PROBE_TOKENS = 4


@dataclass(frozen=True)
class Arrived:
    """A piece of text when it came, and the tokens that the server says came with it."""

    at: float
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Streamed:
    """An answer and its times (time.perf_counter; connecting included)."""

    text: str
    finish_reason: str  # stop or length
    started: float
    first: float | None  # time of the first piece of text; None: all came at once
    ended: float
    prompt_tokens: int | None = None  # as the server counts; None: it sends no usage
    completion_tokens: int | None = None
    # The model's own, where asked for and complete; the stop token may be missing.
    token_ids: list[int] | None = None
    pieces: tuple[Arrived, ...] = ()  # of a stream
    kit: Mapping[str, Any] = field(default_factory=dict)  # usage of a server of this kit


def stream_answer(
    endpoint: Endpoint, messages: list[Message], *, include_usage: bool = True
) -> Streamed:
    """Ask for a stream and read it to its end.

    Raises DataError when the server refuses this conversation or its answer breaks off,
    MedusaKitError when it refuses every request or cannot be reached. An answer that breaks off is
    not asked for again: the second would be timed with the prompt in the server's cache.
    """
    body = {**endpoint.body(messages), "stream": True}
    if include_usage:
        body["stream_options"] = {"include_usage": True}

    def read(response: Any, started: float) -> Streamed:
        if response.headers.get_content_type() != EVENT_STREAM:
            return _whole(endpoint, response.read(), started)
        return _pieces(endpoint, response, started)

    return endpoint.ask(body, read)


def probe(endpoint: Endpoint) -> tuple[Endpoint, bool]:
    """(the endpoint without options it does not know, whether it knows `include_usage`).

    Found out by one to three short requests. `return_token_ids` stays set where the server sends
    them. Raises as `stream_answer` does, before minutes are spent on loading.
    """
    short = replace(endpoint, max_new_tokens=PROBE_TOKENS)
    hello: list[Message] = [{"role": "user", "content": "Hello"}]
    plain = replace(short, return_token_ids=False)
    try:
        got = stream_answer(short, hello)
        return replace(endpoint, return_token_ids=got.token_ids is not None), True
    except DataError:  # it may not know token ids, or stream_options
        endpoint = replace(endpoint, return_token_ids=False)
    if short != plain:
        try:
            stream_answer(plain, hello)
            return endpoint, True
        except DataError:
            pass
    stream_answer(plain, hello, include_usage=False)
    return endpoint, False


def _whole(endpoint: Endpoint, raw: bytes, started: float) -> Streamed:
    ended = time.perf_counter()
    choice, text, usage = endpoint.completion(raw)
    counts = _counts(usage)
    reason = _reason(choice)
    ids = _whole_ids(choice.get("token_ids") or [], counts, reason)
    return Streamed(
        text, reason, started, None, ended, counts["prompt_tokens"],
        counts["completion_tokens"], ids, kit=usage.get("medusa_kit") or {},
    )  # fmt: skip


def _pieces(endpoint: Endpoint, response: Any, started: float) -> Streamed:
    texts, usage, reason = list[str](), dict[str, Any](), None
    ids: list[int] = []
    arrived = list[Arrived]()
    num_assigned = 0  # of `ids`, those that belong to a piece
    for piece in _events(endpoint, response):
        usage = piece.get("usage") or usage
        for choice in piece.get("choices") or ():
            delta = choice.get("delta") or {}
            reason = choice.get("finish_reason") or reason
            ids += choice.get("token_ids") or ()
            if any(delta.get(part) for part in TEXT_PARTS):
                arrived.append(Arrived(time.perf_counter(), tuple(ids[num_assigned:])))
                num_assigned = len(ids)
                texts.append(delta.get("content") or "")
    ended = time.perf_counter()
    if reason is None:
        raise DataError(f"the answer breaks off after {len(arrived)} pieces")
    first = arrived[0].at if arrived else None
    if len(arrived) == 1 and (usage.get("completion_tokens") or 2) > 1:
        first = None  # the server held it back until it was complete
    if arrived and num_assigned < len(ids):  # without text, as a stop token is
        arrived[-1] = replace(arrived[-1], token_ids=(*arrived[-1].token_ids, *ids[num_assigned:]))
    done = "stop" if reason == "stop" else "length"
    counts = _counts(usage)
    return Streamed(
        "".join(texts), done, started, first, ended, counts["prompt_tokens"],
        counts["completion_tokens"], _whole_ids(ids, counts, done), tuple(arrived),
        usage.get("medusa_kit") or {},
    )  # fmt: skip


def _events(endpoint: Endpoint, response: Any) -> Iterator[dict[str, Any]]:
    """The JSON of each `data:` line. Raises DataError where the stream breaks or sends an error."""
    try:
        for line in response:
            kind, _, data = line.strip().partition(b":")
            if kind != b"data":  # comments, event names, blank lines
                continue
            if data.strip() == b"[DONE]":
                return
            piece = parse_json(data)
            if not isinstance(piece, dict) or piece.get("error"):
                raise DataError(f"the server sends an error: {endpoint.quote(data)}")
            yield piece
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"the answer breaks off: {error}") from error
    except ValueError as error:
        raise DataError(f"the server sends a piece that is no JSON: {error}") from error


def _reason(choice: dict[str, Any]) -> str:
    return "stop" if choice.get("finish_reason") == "stop" else "length"


def _whole_ids(ids: list[int], counts: dict[str, int | None], reason: str) -> list[int] | None:
    """None where there are none, or not as many as the server counts.

    This kit's server, for one, counts the stop token but does not send it.
    """
    count = counts["completion_tokens"]
    whole = count in (None, len(ids)) or (reason == "stop" and count == len(ids) + 1)
    return ids if ids and whole else None


def _counts(usage: dict[str, Any]) -> dict[str, int | None]:
    return {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
