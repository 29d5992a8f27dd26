"""Grammars of answers with calls, and of answers behind what a model says to itself."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_kit.serve.tool_calls import CALL, END
from medusa_kit.settings.grammar import Free, Grammar, quoted

NEWLINE = "\n"
SPACE = "/[ \\t\\n\\r]{0,16}/"  # that a model may put behind a tag of its own choice


def calls_grammar(
    calls: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any] | None,
    forced: bool,
    at_most_one: bool,
) -> Grammar:
    """Of calls with these schemas. Unless they are `forced`, other answers may come: JSON of the
    schema `answer`, or any text, which may precede calls too."""
    more = "" if at_most_one else f" ({quoted(NEWLINE)} tag_0 call)*"
    rules = [
        f"call: {quoted(NEWLINE)} written",
        f"written: one {quoted(NEWLINE)} tag_1",
        "one: " + " | ".join(f"call_{number}" for number in range(len(calls))),
        *(f"call_{number}: %json {json.dumps(one)}" for number, one in enumerate(calls)),
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


def _grammar(start: str, rules: Sequence[str], free: Free | None = None) -> Grammar:
    tags = [f"tag_{number}: {quoted(tag)}" for number, tag in enumerate((CALL, END))]
    return Grammar("lark", "\n".join([start, *rules, *tags]), (CALL, END), free)
