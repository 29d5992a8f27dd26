"""Prompts and stop strings as a caller gives them: what each type means, and what is none."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

from medusa_kit.errors import ConfigError, half_pair

Prompt = str | list[dict[str, str]] | list[int]
BYTES = (bytes, bytearray, memoryview)
EXPECTED = "messages, a string or token ids"


def prompt_list(prompt: Any) -> tuple[list[Any], bool]:
    """(prompts, whether a single one was given). Messages, a text or ids are one prompt, a list of
    these is several. Raises ConfigError where there is none."""
    if hasattr(prompt, "tolist") and not isinstance(prompt, BYTES):  # a tensor of ids
        with suppress(RuntimeError, TypeError):  # without numbers; `check_prompt` refuses it
            prompt = prompt.tolist()
    if isinstance(prompt, (str, *BYTES)) or not isinstance(prompt, Sequence):
        return [prompt], True
    items = list(prompt)
    if not items:
        raise ConfigError("there is no prompt", hint=f"give {EXPECTED}")
    if isinstance(items[0], Mapping | Integral):
        return [items], True
    return items, False


def check_prompt(prompt: Any) -> None:
    """Raises ConfigError for what is no prompt."""
    if isinstance(prompt, BYTES):
        raise _wrong("prompt", prompt, EXPECTED, "decode it: prompt.decode()")
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Sequence):
        hint = "a single message goes into a list: [{'role': 'user', 'content': …}]"
        raise _wrong("prompt", prompt, EXPECTED, hint)
    if prompt and isinstance(prompt[0], Integral):  # ids are checked by `as_token_ids`
        return
    for message in prompt:
        if not isinstance(message, Mapping):
            raise _wrong("message", message, "{'role': …, 'content': …}", f"a prompt is {EXPECTED}")


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Raises ConfigError for what is no text."""
    is_list = isinstance(stop, Iterable) and not isinstance(stop, (str, Mapping, *BYTES))
    stops = tuple(stop) if is_list else () if stop is None else (stop,)
    for text in stops:
        if not isinstance(text, str):
            expected = "a string or a list of strings"
            raise _wrong("stop", text, expected, "stop strings are text: stop=['sky']")
        if wrong := half_pair(text, f" of stop {text!r}"):
            raise ConfigError(f"{wrong}; expected text", hint="no answer has it: leave it out")
    if "" in stops:
        raise ConfigError("a stop string is empty", hint="leave it out")
    return stops


def _wrong(what: str, value: Any, expected: str, hint: str) -> ConfigError:
    return ConfigError(
        f"{what} {reprlib.repr(value)} is of type {type(value).__name__}; expected {expected}",
        hint=hint,
    )
