"""A conversation with an engine, kept as token ids (turns.py), so that each turn is read once."""

from collections.abc import Callable
from typing import Any, Protocol

from medusa_kit.base.model import BaseModel
from medusa_kit.data.readers import Message
from medusa_kit.engine.result import GenerationResult
from medusa_kit.engine.streaming import Streaming
from medusa_kit.engine.turns import Answered, Prompt, next_prompt
from medusa_kit.errors import ConfigError, Live
from medusa_kit.shown import shown


class Answering(Protocol):
    """What an engine has for a conversation."""

    @property
    def base(self) -> BaseModel: ...

    @property
    def encode(self) -> Callable[..., list[int]]: ...

    @property
    def generate(self) -> Callable[..., Any]: ...

    @property
    def stream(self) -> Callable[..., Streaming]: ...


class Conversation(Live):
    """Messages and answers in turn. One thread at a time may use it; build with
    `Engine.conversation`.

    A message that cannot be answered raises what `Engine.generate` raises, and is left out.
    """

    def __init__(self, engine: Answering, system: str | None = None) -> None:
        self._engine = engine
        self._messages: list[Message] = []
        if not isinstance(system, str | None):
            raise ConfigError(
                f"system {shown(system)} is of type {type(system).__name__}; expected a string or "
                "None",
                hint="the system message is text",
            )
        if system:
            self._messages.append({"role": "system", "content": system})
        self._last: Answered | None = None
        self._open: tuple[Prompt, Streaming] | None = None

    @property
    def messages(self) -> list[Message]:
        """So far, each answer once it has ended. The list may be edited between turns: what an
        edit changes is encoded and read again."""
        if self._open is not None and self._open[1].ended:
            self._end()
        return self._messages

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt of the newest message."""
        newest = self._newest
        return [] if newest is None else list(newest.ids)

    @property
    def rewritten(self) -> bool:
        """Whether the chat template has changed earlier turns in the newest prompt, so that they
        were encoded again."""
        newest = self._newest
        return newest is not None and newest.rewritten

    @property
    def _newest(self) -> Prompt | None:
        if self._open is not None:
            return self._open[0]
        return None if self._last is None else self._last.prompt

    def send(self, text: str, **options: Any) -> GenerationResult:
        """The answer to the next message. `options`: those of `Engine.generate`."""
        prompt = self._prompt(text)
        result: GenerationResult = self._engine.generate(prompt.ids, **options)
        self._keep(prompt, result)
        return result

    def stream(self, text: str, **options: Any) -> Streaming:
        """The same in pieces. `options`: those of `Engine.stream`. An answer that is not read to
        its end ends when the next message is sent; what there is of it is kept."""
        prompt = self._prompt(text)
        streaming = self._engine.stream(prompt.ids, **options)
        self._open = prompt, streaming
        return streaming

    def _prompt(self, text: str) -> Prompt:
        if not isinstance(text, str):
            raise ConfigError(
                f"message {shown(text)} is of type {type(text).__name__}; expected a string",
                hint="earlier messages are kept by the conversation",
            )
        self._end()
        messages = [*self._messages, {"role": "user", "content": text}]
        tokenizer = self._engine.base.tokenizer
        return next_prompt(tokenizer, messages, self._last, self._engine.encode)

    def _end(self) -> None:
        """Close the answer that is being read, and keep it unless it failed."""
        if self._open is None:
            return
        (prompt, streaming), self._open = self._open, None
        streaming.close()
        if not streaming.failed:
            self._keep(prompt, streaming.result)

    def _keep(self, prompt: Prompt, result: GenerationResult) -> None:
        stops = self._engine.base.stop_token_ids
        message = {"role": "assistant", "content": result.text}
        ids = [token for token in result.token_ids if token not in stops]
        self._last = Answered(prompt, dict(message), ids)
        self._messages += [dict(prompt.messages[-1]), message]
