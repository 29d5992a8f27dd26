"""Grammars of arguments that are written one by one."""

import json
import re
from collections.abc import Sequence

from medusa_kit.serve.calls.argument_form import TEXT, ArgumentForm
from medusa_kit.serve.calls.argument_schemas import Argument, Arguments
from medusa_kit.serve.calls.call_form import ID, NUMBER
from medusa_kit.settings.grammar import quoted

SPACE = "/[ \\t\\n\\r]{0,16}/"
NAME = "[a-zA-Z_][a-zA-Z0-9_.-]{0,63}"  # of arguments that have no name in the schema


def entries_grammar(
    number: int, arguments: Arguments, form: ArgumentForm, marks: Sequence[str]
) -> list[str]:
    """The rules for the arguments of function `number`, the first of which is `arguments_NUMBER`.
    `marks`: of the whole form, which have rules of their own."""
    every = [*arguments.named, *([arguments.further] if arguments.further else [])]
    parts, rules = list[str](), list[str]()
    known = "|".join(re.escape(one.name).replace("/", "\\/") for one in arguments.named)
    for place, one in enumerate(every):
        rule = f"argument_{number}_{place}"
        times = "" if one.required else "?" if one.name else "*"
        parts.append(rule + times)
        other = f" & ~/({known})/" if known else ""
        name = quoted(one.name) if one.name else f"NAME_{number}"
        rules += [] if one.name else [f"NAME_{number}: /{NAME}/{other}"]
        values = " | ".join(_values(one, rule, form, marks))
        rules.append(f"{rule}: {SPACE} {literal(form.opening.lstrip(), marks)} {name} ({values})")
        if not one.value.text or one.value.others:
            rules.append(f"{rule}_json: %json {json.dumps(one.schema)}")
    return [f"arguments_{number}: {' '.join(parts)} {SPACE}", *rules]


def _values(one: Argument, rule: str, form: ArgumentForm, marks: Sequence[str]) -> list[str]:
    """The ways to write a value, with what stands around it."""
    values, head = list[str](), literal(form.head(TEXT), marks)
    behind = literal(form.closing.partition(form.mark)[2], marks)
    if one.value.text and one.choices is not None:
        texts = " | ".join(map(quoted, one.choices))
        values.append(f"{head} ({texts}) {literal(form.closing, marks)}")
    elif one.value.text:
        values.append(f"{head} until_{marks.index(form.mark)} {behind}")
    if not one.value.text or (form.typed and one.value.others):
        closing = f"{SPACE} {literal(form.closing.lstrip(), marks)}"
        heads = " | ".join(literal(text, marks) for text in form.heads_of(one.value.others))
        json_or_word = " | ".join([f"{rule}_json", *map(quoted, form.words_of(one.plain))])
        values.append(f"({heads}) ({json_or_word}) {closing}")
    return values


def until(form: ArgumentForm, marks: Sequence[str]) -> str:
    """The rule for any text up to the mark that ends it."""
    mark = re.escape(form.mark).replace("/", "\\/").replace("\n", "n")
    return f"until_{marks.index(form.mark)}[lazy]: /(.|\\n)*{mark}/"


def literal(text: str, marks: Sequence[str]) -> str:
    """A text as it is, in which marks, ids and numbers stand for their rules. White space is apart,
    since llguidance does not go back to where one of two texts ended."""
    rules = {mark: f"tag_{number}" for number, mark in enumerate(marks)}
    rules |= {ID: "ID", NUMBER: "NUMBER"}
    names = "|".join(map(re.escape, sorted(rules, key=len, reverse=True)))
    parts = re.split(rf"({names}|\s+)", text)
    return " ".join(rules.get(part, quoted(part)) for part in parts if part)
