"""Grammars of answers with calls, and of answers behind what a model says to itself."""

import json
import re
from collections.abc import Mapping
from typing import Any

from medusa_kit.base.tokenizer.thought_marks import MARK
from medusa_kit.serve.calls.argument_grammar import entries_grammar, literal, until
from medusa_kit.serve.calls.argument_schemas import Arguments
from medusa_kit.serve.calls.call_form import FIELDS, HERMES, ID, NUMBER, CallForm
from medusa_kit.serve.calls.channel_grammar import in_channels
from medusa_kit.serve.calls.reasoning import Reasoning
from medusa_kit.settings.grammar import Free, Grammar, quoted

SPACE = "/[ \\t\\n\\r]{0,16}/"  # that a model may put behind a tag of its own choice
SIGNS = "{}[],"  # of JSON, around which a space is free, as around the colon behind a name
PART = re.compile(
    rf"{MARK}|[{ID}{NUMBER}]|\s+|[{{}}\[\],]|(?<=\"):|[^\s{{}}\[\],:<{ID}{NUMBER}]+|."
)


def calls_grammar(
    functions: Mapping[str, Mapping[str, Any] | Arguments],
    answer: Mapping[str, Any] | None,
    forced: bool,
    at_most_one: bool,
    form: CallForm = HERMES,
) -> Grammar:
    """The grammar of calls of these functions, whose arguments have these schemas: documents of
    their own, so that references hold as they are. Unless calls are `forced`, other answers may
    come: JSON of the schema `answer`, or any text, which may precede calls too."""
    rules = [
        "one: " + " | ".join(f"call_{number}" for number in range(len(functions))),
        *(rule for n, one in enumerate(functions.values()) for rule in _arguments(n, one, form)),
        *([] if answer is None or forced else [f"answer: %json {json.dumps(answer)}"]),
    ]
    if form.channels is not None:
        return in_channels(form.channels, list(functions), rules, forced, answer is not None)
    middle, between, closing = (
        _around(text or "", form, behind)
        for text, behind in ((form.middle, False), (form.between, True), (form.closing, True))
    )
    more = "" if at_most_one or form.between is None else f" ({between} one)*"
    rest = form.opening.removeprefix(form.tag)
    rules += [
        *(f"call_{n}: {quoted(name)} {middle} arguments_{n}" for n, name in enumerate(functions)),
        f"written: one{more} {closing}",
        f"forced: tag_0 {_around(rest, form)} written",
        "SP: / ?/",
        f"ID: /{'[a-zA-Z0-9]{9}' if form.taken and form.taken.short_ids else FIELDS[ID]}/",
        f"NUMBER: /{FIELDS[NUMBER]}/",
        *(_tag(number, tag) for number, tag in enumerate(form.marks)),
        *([until(form.arguments, form.marks)] if form.arguments else []),
    ]
    if forced:
        return _grammar("start: forced", rules, form)
    if answer is not None:
        return _grammar("start: answer | forced", rules, form)
    space, tag = "" if form.first else SPACE, _inside(form.tag)
    before = "" if form.first else "(.|\\n)*"
    rules += [
        f"behind: {space} {_around(rest.lstrip(), form)} written",
        f"before[lazy]: /{before}{tag}/",
        f"TEXT: /(.|\\n)*/ & ~/{before}{tag}(.|\\n)*/",
    ]
    return _grammar("start: TEXT | before behind", rules, form, Free(form.tag, first=form.first))


def _arguments(number: int, given: Mapping[str, Any] | Arguments, form: CallForm) -> list[str]:
    """The rules for the arguments of function `number`."""
    if isinstance(given, Arguments) and form.arguments is not None:
        return entries_grammar(number, given, form.arguments, form.marks)
    return [f"arguments_{number}: %json {json.dumps(given)}"]


def _around(text: str, form: CallForm, behind_arguments: bool = False) -> str:
    """What a form has around names and arguments, as a Lark grammar has it."""
    if form.arguments is None:
        return _sequence(text, form, behind_arguments)
    return literal(text.lstrip() if behind_arguments else text, form.marks)


def _sequence(text: str, form: CallForm, behind_json: bool = False) -> str:
    """What a form has around names and arguments, as a Lark grammar has it. A space is free around
    signs of JSON, and where there is one."""
    written, before, behind_sign = list[str](), "}" if behind_json else "\n", False
    for part in PART.findall(text):
        is_line = part.isspace() and "\n" in part
        is_sign = part in SIGNS or (part == ":" and before.endswith('"'))
        joins = (is_sign and not before.isspace()) or (behind_sign and not is_line)
        if joins or (part.isspace() and not is_line):
            written.append("SP")
        if part in form.marks:
            written.append(f"tag_{form.marks.index(part)}")
        elif part in (ID, NUMBER):
            written.append("ID" if part == ID else "NUMBER")
        elif is_line or not part.isspace():
            written.append(quoted(part))
        before, behind_sign = part, is_sign
    return " ".join(written)


def _grammar(start: str, rules: list[str], form: CallForm, free: Free | None = None) -> Grammar:
    return Grammar("lark", "\n".join([start, *rules]), form.marks, free, exact=True)


def _tag(number: int, tag: str) -> str:
    return f"tag_{number}: {quoted(tag)}"


def behind_reasoning(grammar: Grammar | None, reasoning: Reasoning | None) -> Grammar | None:
    """The grammar of an answer before which a model writes any reasoning."""
    if grammar is None or reasoning is None or reasoning.closed:
        return grammar
    opening, closing, opened = reasoning[:3]
    channels = reasoning.channels
    # Calls in channels have the heads of answers too.
    aloud = "" if channels is not None and channels.head in grammar.tags else reasoning.aloud
    if grammar.free is not None:
        return grammar._replace(
            free=grammar.free._replace(reasoning=(opening, closing), opened=opened)
        )
    rules = grammar.text.replace("start:", "answer_alone:", 1)
    if grammar.kind == "json_schema":
        rules = f"answer_alone: %json {grammar.text}"
    first = len(grammar.tags)
    marks = [opening, closing, *filter(None, [aloud])]
    mark = f"tag_{first + 2}? " if aloud else ""
    space = "" if channels else SPACE  # heads have their own
    thoughts = f"until_{first + 1} {space} aloud"
    start = thoughts if opened else f"aloud | tag_{first} {thoughts}"
    tags = [_tag(first + number, tag) for number, tag in enumerate(marks)]
    until = f"until_{first + 1}[lazy]: /(.|\\n)*{_inside(closing)}/"
    rules = "\n".join([f"start: {start}", f"aloud: {mark}answer_alone", rules, *tags, until])
    return Grammar("lark", rules, (*grammar.tags, *marks), exact=grammar.exact)


def _inside(text: str) -> str:
    """A text as it is written inside of /…/."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
