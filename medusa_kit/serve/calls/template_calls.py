"""The form in which a chat template writes calls, found by rendering some."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

from medusa_kit.base.tokenizer.bounded_rendering import bounded
from medusa_kit.base.tokenizer.thought_marks import LAST_MARK, MARK, cut_mark, num_common
from medusa_kit.base.tokenizer.thoughts import thoughts_of
from medusa_kit.data.template import chat_template, render_text
from medusa_kit.errors import DataError
from medusa_kit.serve.calls.call_form import FIELD, HERMES, ID, NUMBER, CallForm, Taken
from medusa_kit.serve.calls.reasoning import channels_of
from medusa_kit.serve.calls.template_arguments import TWO, argument_form
from medusa_kit.serve.calls.tool_messages import for_template

# What no template writes of its own.
QUESTION, ANSWER, TOOL = "Zuquestion", "Zuanswer", "zutool"
NAMES = ("zufirst", "zusecond", "zuthird")
ARGUMENTS = {"zukey": "Zuvalue", "zulist": [1, {"zu": True}]}
Found = Callable[[str], str]  # the arguments in a text, as they stand there
WAYS = [Taken(*way) for way in product((False, True), (False, True))]
_known: WeakKeyDictionary[Any, tuple[str, CallForm]] = WeakKeyDictionary()


def form_of(tokenizer: Any) -> CallForm:
    """The form in which a model is to call: its template's, or else Hermes'."""
    template = chat_template(tokenizer) if tokenizer is not None else None
    if template is None:
        return HERMES
    known = _known.get(tokenizer)
    if known is None or known[0] != template:
        form = HERMES
        with suppress(DataError):  # a template that runs or writes for ever
            form = bounded(template, lambda: _form(tokenizer))
        known = _known[tokenizer] = template, form
    return known[1]


def _form(tokenizer: Any) -> CallForm:
    if (channels := channels_of(tokenizer)) is not None:
        return HERMES._replace(taken=Taken(), channels=channels)
    shows_tools = TOOL in _text(tokenizer, [])
    for find in (_with_an_object, _with_entries):
        for way in WAYS:
            if (form := find(tokenizer, way)) is not None:
                return form._replace(taken=way._replace(tools=shows_tools))
    return HERMES


def _with_an_object(tokenizer: Any, way: Taken) -> CallForm | None:
    """The form of calls whose arguments are a JSON object."""
    if way.as_text and _takes_objects(tokenizer, way):
        return None
    return _found(tokenizer, way, ARGUMENTS, _arguments_in)


def _with_entries(tokenizer: Any, way: Taken) -> CallForm | None:
    """The form of calls with an entry for each argument."""

    def call(arguments: Mapping[str, Any]) -> str:
        text = _text(tokenizer, [_message(1, way, arguments)])
        return text.partition(NAMES[0])[2]

    if way.as_text or (arguments := argument_form(call)) is None:
        return None
    form = _found(tokenizer, way, TWO, lambda _: arguments.written(TWO))
    return form._replace(arguments=arguments) if form and form.closing else None


def _found(
    tokenizer: Any, way: Taken, arguments: Mapping[str, Any], arguments_in: Found
) -> CallForm | None:
    """The form of calls that are given to the template in this way."""
    plain = _text(tokenizer, [{"role": "assistant", "content": ANSWER}])
    one, three = (
        _parts(_text(tokenizer, [_message(n, way, arguments)]), n, arguments_in) for n in (1, 3)
    )
    if one is None or ANSWER not in plain:
        return None
    before, ending = plain.split(ANSWER, 1)
    for first_number in (None, 0, 1):
        opening, middle, closing = _numbered(one, first_number)
        between = None
        if three is not None:
            parts = _numbered(three, first_number)
            if parts[:2] != [opening, middle] or parts[2:4] != parts[4:6] or parts[6] != closing:
                continue
            between = parts[2]
        ends = [ending.strip(), tokenizer.eos_token]
        form = CallForm(
            _without_head(tokenizer, opening, before),
            middle,
            between,
            _ended(closing, ending, ends),
        )
        return form if _readable(form, [*re.findall(MARK, ending), tokenizer.eos_token]) else None
    return None


def _takes_objects(tokenizer: Any, way: Taken) -> bool:
    """Whether the template writes arguments that are an object in some form of its own."""
    text = _text(tokenizer, [_message(1, way._replace(as_text=False), ARGUMENTS)])
    return "zukey" in text and str(ARGUMENTS) not in text


def _text(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """What stands behind a question, with all before it where nothing does; empty where the
    template refuses it."""
    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": TOOL, "description": "", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    with suppress(DataError):
        text = render_text(
            tokenizer, [{"role": "user", "content": QUESTION}, *messages], tools, ask=not messages
        )
        return text.rpartition(QUESTION)[2] if messages else text
    return ""


def _message(num_calls: int, way: Taken, arguments: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {
            "id": _id(number, way),
            "type": "function",
            "function": {"name": name, "arguments": dict(arguments)},
        }
        for number, name in enumerate(NAMES[:num_calls])
    ]
    return for_template([{"role": "assistant", "content": "", "tool_calls": calls}], way)[0]


def _id(number: int, way: Taken) -> str:
    return f"zuid0000{number}" if way.short_ids else f"call_{number}{'zu' * 12}"


def _parts(text: str, num_calls: int, arguments_in: Found) -> list[str] | None:
    """A text without names and arguments: what precedes each, and what follows the last."""
    parts = []
    for name in NAMES[:num_calls]:
        head, found, text = text.partition(name)
        middle, found, text = text.partition(arguments_in(text)) if found else ("", "", "")
        if not found:
            return None
        parts += [head, middle]
    return [*parts, text]


def _arguments_in(text: str) -> str:
    """The arguments as a text has them: on one line, as the grammar of arguments has them too. Else
    what no text has."""
    for match in re.finditer("{", text):
        with suppress(ValueError):
            read, size = json.JSONDecoder().raw_decode(text[match.start() :])
            written = text[match.start() :][:size]
            if read == ARGUMENTS and "\n" not in written:
                return written
    return "\0"


def _numbered(parts: Sequence[str], first_number: int | None) -> list[str]:
    """The parts with ids, and the numbers of calls counted from `first_number`, marked."""
    marked = []
    for place, part in enumerate(parts):
        number = min(place, len(parts) - 2) // 2
        part = re.sub(r"zuid0000\d|call_\d(zu){12}", ID, part)
        if first_number is not None:
            part = re.sub(rf"(?<!\d){number + first_number}(?!\d)", NUMBER, part)
        marked.append(part)
    return marked


def _without_head(tokenizer: Any, opening: str, before: str) -> str:
    """What comes before a first name, without what precedes every answer, and thoughts."""
    own = opening[len(cut_mark(opening[: num_common(opening, before)])) :]
    thoughts = thoughts_of(tokenizer)
    return (own.rpartition(thoughts.closing)[2] if thoughts else own).lstrip()


def _ended(closing: str, ending: str, ends: Sequence[str | None]) -> str:
    """What follows the last arguments, up to the end of the turn. `ending`: of another answer;
    `ends`: what else ends a turn. Some turns with calls have an end of their own."""
    marks = re.findall(MARK, ending)
    if found := [closing.index(end) for end in (*marks, *ends) if end and end in closing]:
        return closing[: min(found)].rstrip()
    return (LAST_MARK.sub("", closing) if marks else closing).rstrip()


def _readable(form: CallForm, ends: Sequence[str]) -> bool:
    """Whether calls of this form can be told from text, and come before the turn's end."""
    texts = (form.opening, form.middle, form.between or "")
    return (
        bool(form.opening and form.tag.strip())
        and not FIELD.match(form.opening)
        and not re.match(r"[\w-]", form.middle)
        and not any(end in text for text in texts for end in ends if end)
    )
