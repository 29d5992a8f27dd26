"""What is wrong with a request's body: the first fault that pydantic found, in JSON's words, with
the value, what was expected, and what to do about it."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from medusa_kit.errors import MedusaKitError, did_you_mean
from medusa_kit.serve.operations.given import Given
from medusa_kit.serve.schema import ChatRequest, CompletionRequest

FIELDS = frozenset([*ChatRequest.model_fields, *CompletionRequest.model_fields])
# pydantic's names of faults -> what was expected; {…}: what it tells of the fault.
EXPECTED: Mapping[str, str] = {
    "string_type": "a string", "int_type": "an integer", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "an object",
    "model_type": "an object", "model_attributes_type": "an object",
    "finite_number": "a finite number", "literal_error": "{expected}",
    "greater_than_equal": "{ge} or more", "less_than_equal": "{le} or less",
    "string_too_short": "at least {min_length}", "string_too_long": "{max_length} at most",
    "too_short": "at least {min_length}", "too_long": "{max_length} at most",
    "string_pattern_mismatch": "1 to 64 characters, no spaces and none of < | \\ / >",
}  # fmt: skip
# The kinds of number and word that a text may hold.
QUOTED: Mapping[str, tuple[type, ...]] = {
    "an integer": (int,), "a number": (int, float), "true or false": (bool,),
}  # fmt: skip
LEAVE_OUT = "leave it out"
CALL = '{"id": "a", "type": "function", "function": {"name": "…", "arguments": "{}"}}'
# How fields begin, and a hint for those; any other can be left out.
FORMS = (
    (r"messages\.\d+\.content", 'for instance "content": "Hello"'),
    (r"messages\.\d+\.tool_calls", f"for instance {CALL}"),
    (r"messages\.\d+\.(name|reasoning_content)", LEAVE_OUT),
    (r"messages\.\d+", 'a message is {"role": "user", "content": "…"}'),
    ("messages", 'messages are [{"role": "user", "content": "…"}]'),
    ("model$", "GET /v1/models lists all"),
    ("$", 'for instance {"model": "…", "messages": […]}'),
    ("prompt$", 'for instance "prompt": "Hello"'),
    ("stop", 'for instance ["\\n"]'),
    ("metadata", 'for instance {"chat": "5"}'),
    ("logit_bias", 'for instance {"42": -100}'),
    ("response_format", 'for instance {"type": "json_object"}'),
    ("stream_options", 'for instance {"include_usage": true}'),
    ("tools", 'tools are [{"type": "function", "function": {"name": "…", "parameters": {…}}}]'),
)


def explain_invalid(errors: Sequence[Any]) -> tuple[str, str | None]:
    """(message, field) of the fault to report, of those that pydantic found."""
    alike = _most_specific(errors)
    item, path = alike[0], _path(alike[0])
    name = ".".join(str(part) for part in path)
    match item["type"]:
        case "json_invalid":
            return f"the body is no JSON: {item['ctx']['error']}", None
        case "extra_forbidden":
            hint = did_you_mean(path[-1], FIELDS) if len(path) == 1 else None
            return f"the field {name!r} is unknown" + (f"; {hint}" if hint else ""), name
        case "missing":
            return (f"{name!r} is missing" if name else "the body is missing"), name or None
        case "value_error":
            cause = item["ctx"]["error"]
            blamed = ".".join(filter(None, (name, getattr(cause, "param", None))))
            hint = _form_of(name) if type(cause) is ValueError else None
            return str(MedusaKitError(str(cause), hint=hint)), blamed or None
    return _about_value(name, item, [_expected(one) for one in alike]), name or None


def _most_specific(items: Sequence[Any]) -> list[Any]:
    """The fault to report: the first; where a value may have one of several kinds, those of the
    kind that fits best, which fails deepest inside."""
    location = items[0]["loc"][:-1]
    if not any(_is_kind(part) for part in items[0]["loc"]):
        return [items[0]]
    alike = [item for item in items if item["loc"][: len(location)] == location]
    best = max(alike, key=lambda item: len(item["loc"]))
    if not best["type"].endswith("_type"):
        return [best]
    return [one for one in alike if one["type"].endswith("_type")
            and (_path(one), len(one["loc"])) == (_path(best), len(best["loc"]))]  # fmt: skip


def _path(item: Any) -> list[Any]:
    """The path of the value in the body, without the kinds that pydantic has tried. A field that is
    unknown may have any name."""
    known = item["loc"][:-1] if item["type"] == "extra_forbidden" else item["loc"]
    kept = [part for part in known if part != "body" and not _is_kind(part)]
    return [*kept, *item["loc"][len(known) :]]


def _is_kind(part: Any) -> bool:
    return isinstance(part, str) and (
        part == "str" or "[" in part or part.startswith("constrained-")
    )


def _about_value(name: str, item: Any, expected: Sequence[str]) -> str:
    given, fault = Given.of(item["input"]), item["type"]
    problem = f"is {given.kind}"
    if fault.startswith("string_too"):
        problem = f"has {given.size:,} characters"
    elif fault.startswith("too"):
        problem = f"has {given.size:,} items"
    elif not fault.endswith("_type"):
        problem = "is unknown" if fault == "literal_error" else "is out of range"
    value = "" if given.kind == "null" else f" {given.shown}"
    wanted = " or ".join(dict.fromkeys(expected))
    message = f"{name or 'the body'}{value} {problem}; expected {wanted}"
    return str(MedusaKitError(message, hint=_hint(name, given.value, fault, wanted)))


def _expected(item: Any) -> str:
    words = EXPECTED.get(item["type"])
    return str(item["msg"]) if words is None else words.format(**item.get("ctx", {}))


def _hint(name: str, value: Any, fault: str, expected: str) -> str:
    usual = _form_of(name) or LEAVE_OUT
    if fault == "literal_error":
        return did_you_mean(value, re.findall(r"'([^']*)'", expected)) or usual
    if expected.startswith("a string") and type(value) in (int, float, bool):
        return f'write it in quotes: "{json.dumps(value)}"'
    if isinstance(value, str) and len(value) < 40 and expected in QUOTED:
        with suppress(ValueError):
            if type(meant := json.loads(value.lower())) in QUOTED[expected]:
                return f"write it without quotes: {json.dumps(meant)}"
    return usual


def _form_of(name: str) -> str | None:
    return next((hint for start, hint in FORMS if re.match(start, name)), None)
