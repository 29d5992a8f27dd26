"""Answers from an OpenAI-compatible server, so that a large base can be served elsewhere.

The server sends text; token ids come from re-encoding it, or from vLLM's own `token_ids` where
asked for.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from medusa_kit.data.readers import Message
from medusa_kit.data.template import end_of_turn_id
from medusa_kit.errors import ConfigError, DataError, MedusaKitError, UsageError
from medusa_kit.settings.sampling import SamplingParams

RETRIES = 5
FIRST_WAIT_SECONDS = 1.0  # doubled at every retry
RETRYABLE = {429, 500, 502, 503, 504}
ROWS_FAULT = {400, 413, 422}  # this request is refused, for instance as too long; others may pass
OPENAI_SAMPLING = ("top_p", "presence_penalty", "frequency_penalty", "logit_bias")
EXTENDED_SAMPLING = ("top_k", "min_p", "repetition_penalty")  # vLLM and others know them
T = TypeVar("T")


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

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"endpoint {self.url!r} is no URL; expected http://… or https://…, up to /v1"
            )

    def answer(self, messages: list[Message], tokenizer: Any) -> tuple[list[int], str, bool]:
        """(response ids, finish reason, whether they were re-tokenised) for a conversation.

        Raises DataError when the server refuses this conversation, MedusaKitError when it refuses
        us or stays away.
        """
        choice, text, _ = self.completion(
            self.ask(self.body(messages), lambda response, _: response.read())
        )
        reason = "stop" if choice.get("finish_reason") == "stop" else "length"
        if self.return_token_ids:
            if not choice.get("token_ids"):
                raise UsageError(
                    f"{self.url} sends no token_ids",
                    hint="vLLM and recent SGLang do; leave out --return-token-ids",
                )
            return [int(token) for token in choice["token_ids"]], reason, False
        return encode_again(tokenizer, text, reason), reason, True

    def completion(self, raw: bytes) -> tuple[dict[str, Any], str, dict[str, Any]]:
        """(choice, text, usage) of a reply that came whole. Raises MedusaKitError if it is none."""
        try:
            reply = json.loads(raw)
            choice = reply["choices"][0]
            return choice, choice["message"]["content"] or "", reply.get("usage") or {}
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise self._no_completion(raw) from error

    def body(self, messages: list[Message]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_new_tokens,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
        }
        for name in (*OPENAI_SAMPLING, *EXTENDED_SAMPLING):
            if value := getattr(self.sampling, name):  # what is at rest is not sent
                body[name] = value
        if self.return_token_ids:
            body["return_token_ids"] = True
        return body

    def headers(self) -> dict[str, str]:
        """With the key, where the environment has one."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key_env):
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def ask(self, body: dict[str, Any], read: Callable[[Any, float], T]) -> T:
        """What `read` makes of (the response, when this attempt began by time.perf_counter).

        Asks again where the server is busy, away, or breaks off while `read` reads, unless `read`
        turns that into an error of ours. Raises as `answer` does.
        """
        request = urllib.request.Request(
            self.url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), self.headers()
        )
        for attempt in range(RETRIES + 1):
            started = time.perf_counter()
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_seconds) as response:
                    return read(response, started)
            except urllib.error.HTTPError as error:
                if error.code not in RETRYABLE or attempt == RETRIES:
                    raise self._refused(error) from error
            except (OSError, http.client.HTTPException) as error:
                if attempt == RETRIES:
                    raise MedusaKitError(
                        f"{self.url} cannot be reached: {error}", hint="is the server running?"
                    ) from error
            time.sleep(self.first_wait_seconds * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _no_completion(self, reply: bytes) -> MedusaKitError:
        return MedusaKitError(
            f"{self.url} sends no chat completion: {reply.decode(errors='replace')[:200]}",
            hint="does the URL end in /v1, and is the server OpenAI-compatible?",
        )

    def _refused(self, error: urllib.error.HTTPError) -> MedusaKitError:
        hints = {
            401: f"put the key into the environment variable {self.api_key_env}",
            404: f"does the server serve the model {self.model!r}, and does the URL end in /v1?",
        }
        detail = error.read().decode(errors="replace")[:200]
        kind = DataError if error.code in ROWS_FAULT else MedusaKitError
        return kind(f"{self.url} answers {error.code}: {detail}", hint=hints.get(error.code))


def encode_again(tokenizer: Any, text: str, reason: str) -> list[int]:
    """Token ids of an answer that came as text, ended as a turn where it ended by itself."""
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    if reason == "stop" and (end := end_of_turn_id(tokenizer)) is not None:
        ids.append(end)
    return ids
