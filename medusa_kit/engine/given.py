"""Prompts and stop strings as a caller gives them: what each type means, and what is none."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

from medusa_kit.errors import ConfigError, half_pair, unknown_value
from medusa_kit.infer.cpu.verifier import refuse_large_trees
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.details import NOTHING, OutputOptions
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.shown import shown

Prompt = str | list[dict[str, str]] | list[int]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
KEYWORDS = ("max_new_tokens", "stop", "drafter", "drafter_options", "batch_size", "n", "logprobs",
            "progress")  # fmt: skip
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


def check_roles(prompt: Any, template: str | None) -> None:
    """Raises ConfigError for a message whose role is none of the usual ones, nor in the template:
    most templates would write it as it is, or leave the message out."""
    for message in () if isinstance(prompt, str) else prompt:
        role = message.get("role")
        mentioned = any(f"{quote}{role}{quote}" in (template or "") for quote in "'\"")
        if role not in ROLES and not mentioned:
            raise unknown_value("role", role, ROLES)


def sampling_of(options: Mapping[str, Any]) -> SamplingParams:
    """Raises ConfigError for a keyword that no call takes, with the nearest of those that it
    takes."""
    return SamplingParams.of(options, KEYWORDS)


def output_options(logprobs: Any) -> OutputOptions:
    """Raises ConfigError for what is no number of tokens."""
    if logprobs is None:
        return NOTHING
    is_number = isinstance(logprobs, Integral) and not isinstance(logprobs, bool)
    if not is_number or int(logprobs) < 0:
        raise ConfigError(
            f"logprobs {shown(logprobs)} is out of range; expected an integer, 0 or more",
            hint="0 gives those of the answer's own tokens alone",
        )
    return OutputOptions(int(logprobs))


def given_drafter(drafter: Drafter, options: Any, activations: str) -> Drafter:
    """A drafter that a caller made. Raises ConfigError for options, and for trees that are too
    large for the activations."""
    if options is not None:
        raise ConfigError(
            f"drafter_options {shown(options)} has no meaning with a drafter that is an object",
            hint="give them to the drafter when it is made",
        )
    refuse_large_trees(activations, drafter.num_nodes)
    return drafter


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Raises ConfigError for what is no text."""
    is_list = isinstance(stop, Iterable) and not isinstance(stop, (str, Mapping, *BYTES))
    stops = tuple(stop) if is_list else () if stop is None else (stop,)
    for text in stops:
        if not isinstance(text, str):
            expected = "a string or a list of strings"
            raise _wrong("stop", text, expected, "stop strings are text: stop=['sky']")
        if wrong := half_pair(text, f" of stop {shown(text)}"):
            raise ConfigError(f"{wrong}; expected text", hint="no answer has it: leave it out")
    if "" in stops:
        raise ConfigError("a stop string is empty", hint="leave it out")
    return stops


def _wrong(what: str, value: Any, expected: str, hint: str) -> ConfigError:
    return ConfigError(
        f"{what} {shown(value)} is of type {type(value).__name__}; expected {expected}",
        hint=hint,
    )
