"""Answers from an OpenAI-compatible server, so that a large base can be served elsewhere.

The server sends text. Token ids come from encoding it again, or from vLLM's `token_ids` where asked
for.

The client is the standard library's. `openai` takes two seconds to import and 30 MB, and hides when
the attempt began that the bench times. `httpx2` (of huggingface_hub 2; `httpx` of 1) makes the code
no shorter.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from medusa_kit.base.retry_after import seconds_to_wait
from medusa_kit.data.chat import encode_prompt
from medusa_kit.data.readers import Message
from medusa_kit.data.template import (
    chat_template,
    check_characters,
    encode_after,
    end_of_turn_id,
)
from medusa_kit.errors import ConfigError, DataError, MedusaKitError, UsageError
from medusa_kit.files import parse_json
from medusa_kit.settings.sampling import NARROWING, SCORES, SamplingParams
from medusa_kit.shown import shown

RETRIES = 5
FIRST_WAIT_SECONDS = 1.0  # doubled at every retry
RETRYABLE = {429, 500, 502, 503, 504}
ROWS_FAULT = {400, 413, 422}  # only this request is refused, for instance as too long
QUOTED = 200  # characters of a server's reply in a message
T = TypeVar("T")


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error like others: following it would show the key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask. The key comes from the environment, never from a flag."""

    url: str  # up to and including /v1
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    max_new_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    return_token_ids: bool = False  # vLLM's extension
    timeout_seconds: float = 600.0
    first_wait_seconds: float = FIRST_WAIT_SECONDS
    retries: int = RETRIES

    def __post_init__(self) -> None:
        try:
            parts = urllib.parse.urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # brackets, or a port that is no number
            usable, parts = False, urllib.parse.urlsplit("")
        if "@" in parts.netloc:
            raise ConfigError(
                "the endpoint's URL has a user name or password in it, expected none",
                hint=f"put the key into the environment variable {self.api_key_env}",
            )
        if not usable:
            raise ConfigError(
                f"endpoint {self.url!r} is no URL; expected http://… or https://…, up to /v1"
            )

    def answer(self, messages: list[Message], tokenizer: Any) -> tuple[list[int], str, bool]:
        """(response ids, finish reason, whether they were re-tokenised) for a conversation. Where
        the tokenizer has no chat template, the server continues the prompt's tokens.

        Raises DataError when the server refuses this conversation, MedusaKitError when it refuses
        every request or cannot be reached.
        """
        goes_on = chat_template(tokenizer) is None
        prompt = encode_prompt(tokenizer, messages) if goes_on else messages
        choice, text, usage = self.completion(
            self.ask(self.body(prompt), lambda response, _: response.read())
        )
        reason = "stop" if choice.get("finish_reason") == "stop" else "length"
        if self.return_token_ids:
            ids = self._own_ids(choice)
            if reason == "stop" and usage.get("completion_tokens") == len(ids) + 1:
                ids = with_end(tokenizer, ids)  # counted, but not sent
            return ids, reason, False
        _check_whole(choice.get("message") or {})
        check_characters([{"content": text}])
        return encode_again(tokenizer, text, reason, goes_on), reason, True

    def _own_ids(self, choice: dict[str, Any]) -> list[int]:
        """The model's own token ids. Raises DataError where they are none."""
        ids = choice.get("token_ids")
        if ids is None:
            raise UsageError(
                f"{self.url} sends no token_ids",
                hint="vLLM and recent SGLang do; leave out --return-token-ids",
            )
        if not isinstance(ids, list) or any(type(token) is not int or token < 0 for token in ids):
            raise DataError(f"{self.url} sends token_ids {shown(ids)}; expected token ids")
        return ids

    def completion(self, raw: bytes) -> tuple[dict[str, Any], str, dict[str, Any]]:
        """(choice, text, usage) of a reply that is not streamed. Raises MedusaKitError."""
        try:
            reply = parse_json(raw)
            choice = reply["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            if not isinstance(text, str | None):
                raise TypeError(text)
            return choice, text or "", reply.get("usage") or {}
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise self._no_completion(raw) from error

    def body(self, prompt: list[Message] | list[int]) -> dict[str, Any]:
        """The body of a request for the answer to a conversation, or for what continues these
        tokens."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt" if prompt and isinstance(prompt[0], int) else "messages": prompt,
            "max_tokens": self.max_new_tokens,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
        }
        for name in (*NARROWING, *SCORES):
            if value := getattr(self.sampling, name):  # defaults are not sent
                body[name] = value
        if self.return_token_ids:
            body["return_token_ids"] = True
        return body

    def headers(self) -> dict[str, str]:
        """The request's headers, with the key where the environment has one. Raises ConfigError for
        an impossible one."""
        headers = {"Content-Type": "application/json"}
        if key := self._key():
            if not (key.isascii() and key.isprintable()):
                raise ConfigError(
                    f"the key in the environment variable {self.api_key_env} has characters that "
                    "no key has",
                    hint="was it copied with line breaks or typographic characters?",
                )
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def _key(self) -> str:
        return os.environ.get(self.api_key_env, "").strip()

    def quote(self, reply: bytes) -> str:
        """The beginning of what the server says, for a message; without the key, if it is there."""
        text = reply.decode(errors="replace")
        if key := self._key():
            text = text.replace(key, "***")
        return text if len(text) <= QUOTED else f"{text[:QUOTED]}…"

    def ask(self, body: dict[str, Any], read: Callable[[Any, float], T]) -> T:
        """What `read` returns for the response and the time.perf_counter when the attempt began.

        Asks again where the server is busy or cannot be reached, or where the connection breaks
        while `read` reads, unless `read` raises an error of ours. Raises as `answer` does.
        """
        path = "/completions" if "prompt" in body else "/chat/completions"
        request = urllib.request.Request(
            self.url.rstrip("/") + path, json.dumps(body).encode(), self.headers()
        )
        opener = urllib.request.build_opener(NoRedirects)
        for attempt in range(self.retries + 1):
            wait = self.first_wait_seconds * 2**attempt
            started = time.perf_counter()
            try:
                with opener.open(request, timeout=self.timeout_seconds) as response:
                    return read(response, started)
            except urllib.error.HTTPError as error:
                seconds = seconds_to_wait(error.headers.get("Retry-After"), otherwise=wait)
                if error.code not in RETRYABLE or attempt == self.retries or seconds is None:
                    raise self._refused(error) from error
                wait = seconds
            except (OSError, http.client.HTTPException) as error:
                if attempt == self.retries:
                    raise MedusaKitError(
                        f"{self.url} cannot be reached: {error}", hint="is the server running?"
                    ) from error
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _no_completion(self, reply: bytes) -> MedusaKitError:
        return MedusaKitError(
            f"{self.url} sends no completion: {self.quote(reply)}",
            hint="does the URL end in /v1, and is the server OpenAI-compatible?",
        )

    def _refused(self, error: urllib.error.HTTPError) -> MedusaKitError:
        hint = {
            401: f"put the key into the environment variable {self.api_key_env}",
            404: f"does the server serve the model {self.model!r} (--endpoint-model gives its name "
            "there), and does the URL end in /v1?",
            429: "too many requests: wait, then run the same command again",
        }.get(error.code)
        if 300 <= error.code < 400:
            hint = "redirects are not followed: name the URL that it sends you to, "
            hint += self.quote(error.headers.get("Location", "").encode())
        kind = DataError if error.code in ROWS_FAULT else MedusaKitError
        return kind(f"{self.url} answers {error.code}: {self.quote(error.read())}", hint=hint)


def _check_whole(message: dict[str, Any]) -> None:
    """Raises DataError where the text is not all that the model wrote."""
    apart = ("tool_calls", "function_call", "reasoning_content", "reasoning")
    if field_name := next((key for key in apart if message.get(key)), None):
        raise DataError(
            f"the server sends a part of the answer as {field_name!r}, so its tokens are not known",
            hint="start it without a parser of reasoning or calls, or add --return-token-ids",
        )


def encode_again(tokenizer: Any, text: str, reason: str, goes_on: bool = False) -> list[int]:
    """Token ids of an answer that came as text, with the end of the turn where it was complete.
    `goes_on`: the text continues the prompt's, so no token may stand for a text's beginning. So it
    does where a space comes first, which some tokenizers add to the beginning of a text."""
    ids = encode_after(tokenizer, text) if goes_on or text.startswith(" ") else None
    if ids is None:
        ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    return with_end(tokenizer, ids) if reason == "stop" else ids


def with_end(tokenizer: Any, ids: list[int]) -> list[int]:
    """The ids and the end of the turn, unless they end with it."""
    end = end_of_turn_id(tokenizer)
    return ids if end is None or ids[-1:] == [end] else [*ids, end]
