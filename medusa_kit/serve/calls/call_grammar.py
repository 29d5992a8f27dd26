"""Grammars of answers with calls, and of answers behind what a model says to itself."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_kit.serve.calls.channel_grammar import in_channels
from medusa_kit.serve.calls.reasoning import Reasoning
from medusa_kit.serve.calls.tool_calls import CALL, END
from medusa_kit.settings.grammar import Free, Grammar, quoted

NEWLINE = "\n"
ONE_SPACE = "SP: / ?/"  # around what a call is made of
SPACE = "/[ \\t\\n\\r]{0,16}/"  # that a model may put behind a tag of its own choice


def calls_grammar(
    functions: Mapping[str, Mapping[str, Any]],
    answer: Mapping[str, Any] | None,
    forced: bool,
    at_most_one: bool,
) -> Grammar:
    """The grammar of calls of these functions, whose arguments have these schemas. Unless calls are
    `forced`, other answers may come: JSON of the schema `answer`, or any text, which may precede
    calls too."""
    more = "" if at_most_one else f" ({quoted(NEWLINE)} tag_0 call)*"
    rules = [
        f"call: {quoted(NEWLINE)} written",
        f"written: one {quoted(NEWLINE)} tag_1",
        "one: " + " | ".join(f"call_{number}" for number in range(len(functions))),
        *(_call(number, name) for number, name in enumerate(functions)),
        *(f"arguments_{n}: %json {json.dumps(one)}" for n, one in enumerate(functions.values())),
        ONE_SPACE,
    ]
    if forced:
        return _grammar(f"start: tag_0 call{more}", rules)
    if answer is None:
        tag = re.escape(CALL)
        rules += [
            f"behind: {SPACE} written{more}",
            f"before[lazy]: /(.|\\n)*{tag}/",
            f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{tag}(.|\\n)*/",
        ]
        return _grammar("start: TEXT | before behind", rules, Free(CALL))
    rules.append(f"answer: %json {json.dumps(answer)}")
    return _grammar(f"start: answer | tag_0 call{more}", rules)


def _call(number: int, name: str) -> str:
    """The rule of a call. The arguments' schema is a document of its own, so that its references
    hold as they are."""
    before = [quoted(part) for part in ("{", '"name"', ":", f'"{name}"', ",", '"arguments"', ":")]
    return f"call_{number}: " + " SP ".join([*before, f"arguments_{number}", quoted("}")])


def _grammar(start: str, rules: Sequence[str], free: Free | None = None) -> Grammar:
    rules = [start, *rules, _tag(0, CALL), _tag(1, END)]
    return Grammar("lark", "\n".join(rules), (CALL, END), free)


def _tag(number: int, tag: str) -> str:
    return f"tag_{number}: {quoted(tag)}"


def behind_reasoning(grammar: Grammar | None, reasoning: Reasoning | None) -> Grammar | None:
    """The grammar of an answer before which a model writes any reasoning."""
    if grammar is None or reasoning is None or reasoning.closed:
        return grammar
    opening, closing, opened = reasoning[:3]
    channels, aloud = reasoning.channels, reasoning.aloud
    if channels is not None and channels.recipient and CALL in grammar.tags:
        grammar, aloud = in_channels(grammar, channels), ""
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
    return Grammar("lark", rules, (*grammar.tags, *marks))


def _inside(text: str) -> str:
    """A text as it is written inside of /…/."""
    return re.escape(text).replace("/", "\\/")
