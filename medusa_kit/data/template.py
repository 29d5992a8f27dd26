"""The tokenizer's chat template: choosing it, rendering with it, the token that ends a turn."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from types import MappingProxyType
from typing import Any

from medusa_kit.base.tokenizer.bounded_rendering import bounded
from medusa_kit.base.tokenizer.content_parts import as_taken
from medusa_kit.base.tokenizer.thought_ways import KEY as THOUGHTS
from medusa_kit.base.tokenizer.thoughts import with_thoughts
from medusa_kit.base.tokenizer.turn_end import end_of_turn
from medusa_kit.data.rows import Message, kind_of, text_of
from medusa_kit.errors import DataError, half_pair

NOTHING: Mapping[str, Any] = MappingProxyType({})
NOW = re.compile(r"""strftime_now\(\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\)""")
_date: ContextVar[datetime | None] = ContextVar("date", default=None)
TEXTS = ("name", "tool_call_id", "reasoning_content")  # of a message, beside its content
INSTEAD = ("tool_calls", "reasoning_content", "thinking", "function_call")  # of content
NEIGHBOURS = ("x", ".", "\n", "1")  # few tokens join any of these with what follows, none all


def chat_template(tokenizer: Any) -> str | None:
    """The chat template; of several named ones the one called default.

    Raises DataError where there are several and none is called so.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, dict):
        return template or None
    if "default" not in template:
        raise DataError(
            f"the tokenizer's chat templates are named {', '.join(map(repr, template))}; "
            "expected one named 'default'",
            hint="set the tokenizer's chat_template to the one to use, and save it",
        )
    return template["default"]


def end_of_turn_id(tokenizer: Any) -> int | None:
    """The token that ends the assistant's turns: the chat template's, else the tokenizer's."""
    end: int | None = end_of_turn(tokenizer)
    return tokenizer.eos_token_id if end is None else end


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] = NOTHING,
) -> list[int]:
    """Token ids of the conversation. `tools`: functions that the template tells the model of;
    `variables`: of the template. Raises DataError where the template refuses it."""
    keywords = _template_keywords(tools, variables)
    return list(
        _rendered(tokenizer, messages, add_generation_prompt, return_dict=False, **keywords)
    )


def render_text(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] = NOTHING,
    ask: bool = True,
) -> str:
    """Text of the conversation, with `ask` ready for the answer. Raises DataError as `render`
    does."""
    keywords = _template_keywords(tools, variables)
    return str(_rendered(tokenizer, messages, ask, tokenize=False, **keywords))


def _rendered(tokenizer: Any, messages: Sequence[Message], ask: bool, **keywords: Any) -> Any:
    """The tokenizer's text or token ids, within the limits of bounded_rendering.py."""
    messages = as_texts(messages)
    with refusals():
        arguments = {"add_generation_prompt": ask, **_on_its_date(tokenizer), **keywords}

        def apply() -> Any:  # what the template takes is found by rendering, bounded too
            taken = as_taken(tokenizer, messages)
            if any(message.get(THOUGHTS) for message in taken):
                with suppress(Exception):
                    thinking = with_thoughts(tokenizer, taken)
                    return tokenizer.apply_chat_template(thinking, **arguments)
                # Some templates refuse thoughts beside words and calls.
                taken = [{k: v for k, v in one.items() if k != THOUGHTS} for one in taken]
            return tokenizer.apply_chat_template(taken, **arguments)

        return bounded(dated(chat_template(tokenizer)), apply)


@contextmanager
def rendered_on(date: datetime | None) -> Iterator[None]:
    """A context in which templates that write the date write this one, in place of today's."""
    token = _date.set(date)
    try:
        yield
    finally:
        _date.reset(token)


def dated(template: str | None) -> str | None:
    """The template, with the date of `rendered_on` in place of today's."""
    date = _date.get()
    if template is None or date is None:
        return template
    return NOW.sub(lambda m: json.dumps(date.strftime(m[1] or m[2] or "")), template)


def _on_its_date(tokenizer: Any) -> dict[str, Any]:
    template = None if _date.get() is None else chat_template(tokenizer)
    written = dated(template)
    return {} if written == template else {"chat_template": written}


def _template_keywords(
    tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
) -> dict[str, Any]:
    tools_keyword = {} if tools is None else {"tools": [dict(tool) for tool in tools]}
    return {**variables, **tools_keyword}


def encodes_text(tokenizer: Any) -> bool:
    """Whether messages are encoded as the text that `render_text` makes of them. Tokenizers with a
    way of their own may do otherwise."""
    from transformers import PreTrainedTokenizerBase

    own = getattr(tokenizer.apply_chat_template, "__func__", None)
    return own is PreTrainedTokenizerBase.apply_chat_template


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text, special tokens in it included."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def encode_after(tokenizer: Any, text: str) -> list[int] | None:
    """Token ids of rendered text that follows other text; None where they cannot be told apart.

    It is encoded after a character that its first token is not joined with, since some tokenizers
    put a space before whatever begins a text.
    """
    for character in NEIGHBOURS:
        alone = encode_text(tokenizer, character)
        both = encode_text(tokenizer, character + text)
        known = tokenizer.unk_token_id not in alone  # else it stands for more than the character
        if known and both[: len(alone)] == alone:
            return both[len(alone) :]
    return None


def as_texts(messages: Sequence[Any]) -> list[Message]:
    """The messages, each content as text. Raises DataError, naming the message, where something
    else stands for text."""
    texts = list[Message]()
    for number, message in enumerate(messages, start=1):
        try:
            texts.append(_as_text(message))
        except DataError as error:
            raise DataError(f"message {number}: {error.message}", hint=error.hint) from error
    check_characters(texts)
    return texts


def _as_text(message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"it is {kind_of(message)}, expected an object with role and content")
    for key in ("role", *TEXTS):
        text = message.get(key)
        if not isinstance(text, str) and (text is not None or key == "role"):
            raise DataError(f"{key} is {kind_of(text)}, expected text")
    content = message.get("content")
    silent = content is None and any(message.get(key) is not None for key in INSTEAD)
    return {**message} if silent else {**message, "content": text_of(content)}


def check_characters(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises DataError for half of a surrogate pair, which tokenizers do not encode. Bytes that are
    no UTF-8 become some on a command line, and JSON may hold them."""
    described = [message for message in messages if isinstance(message, Mapping)]
    texts = [text for message in described for text in message.values() if isinstance(text, str)]
    for text in texts:
        if wrong := half_pair(text, " of a message"):
            raise DataError(f"{wrong}; expected text", hint="decode bytes with errors='replace'")


@contextmanager
def refusals() -> Iterator[None]:
    """Turns whatever a template raises about a conversation into a DataError."""
    from jinja2.exceptions import TemplateError

    try:
        yield
    except (
        TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError,
        RecursionError,
    ) as error:  # fmt: skip
        raise DataError(f"the chat template refuses the conversation: {error}") from error
