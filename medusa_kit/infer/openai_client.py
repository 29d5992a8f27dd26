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
from dataclasses import dataclass, field
from typing import Any

from medusa_kit.data.readers import Message
from medusa_kit.errors import ConfigError, DataError, MedusaKitError, UsageError
from medusa_kit.infer.sampling import SamplingParams

RETRIES = 5
FIRST_WAIT_SECONDS = 1.0  # doubled at every retry
RETRYABLE = {429, 500, 502, 503, 504}
ROWS_FAULT = {400, 413, 422}  # this request is refused, for instance as too long; others may pass
OPENAI_SAMPLING = ("top_p", "presence_penalty", "frequency_penalty", "logit_bias")
EXTENDED_SAMPLING = ("top_k", "min_p", "repetition_penalty")  # vLLM and others know them


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
        reply = self._post(self._body(messages))
        try:
            choice = reply["choices"][0]
            text = choice["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise self._no_completion(reply) from error
        reason = "stop" if choice.get("finish_reason") == "stop" else "length"
        if self.return_token_ids:
            if not choice.get("token_ids"):
                raise UsageError(
                    f"{self.url} sends no token_ids",
                    hint="only vLLM does; leave out --return-token-ids",
                )
            return [int(token) for token in choice["token_ids"]], reason, False
        ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        if reason == "stop" and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        return ids, reason, True

    def _body(self, messages: list[Message]) -> dict[str, Any]:
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

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key_env):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            self.url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers
        )
        for attempt in range(RETRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_seconds) as response:
                    raw = response.read()
                break
            except urllib.error.HTTPError as error:
                if error.code not in RETRYABLE or attempt == RETRIES:
                    raise self._refused(error) from error
            except (OSError, http.client.HTTPException) as error:
                if attempt == RETRIES:
                    raise MedusaKitError(
                        f"{self.url} cannot be reached: {error}", hint="is the server running?"
                    ) from error
            time.sleep(self.first_wait_seconds * 2**attempt)
        try:
            return json.loads(raw)
        except ValueError as error:
            raise self._no_completion(raw) from error

    def _no_completion(self, reply: Any) -> MedusaKitError:
        return MedusaKitError(
            f"{self.url} sends no chat completion: {str(reply)[:200]}",
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
