"""Calls with one entry for each argument, in the form that a chat template writes: found, read and
held to it by a grammar."""

import json
import random
from typing import Any

import pytest
from support.samples import pairs
from support.serving.grammars import accepts
from support.serving.served_calls import QUESTION, check_served
from support.serving.tagged import tagged_tokenizer
from support.text.argument_templates import ENTRIES, OTHERS

from medusa_kit.data.template import render_text
from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.grammars.source import begun_fault_of
from medusa_kit.serve.calls.argument_form import TYPES, ArgumentForm, Value
from medusa_kit.serve.calls.argument_schemas import arguments_of
from medusa_kit.serve.calls.call_form import HERMES, CallForm
from medusa_kit.serve.calls.reading import AnswerReader, Reading
from medusa_kit.serve.calls.template_calls import form_of
from medusa_kit.serve.calls.tool_calls import ReadAnswer, read_answer
from medusa_kit.serve.calls.tools import Constraint, constraint_of

NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TEXT_OR_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"}, "choice": {"enum": ["a b", "a", "c"]}, "real": {"type": "number"},
    "yes": {"type": "boolean"}, "nothing": {"type": "null"}, "object": {"type": "object"},
    "list": {"type": "array", "items": {"type": ["string", "integer"]}}, "maybe": NULLABLE,
    "any": {}, "a-code": {"type": "string", "pattern": "^[ab]+$"}, "either": TEXT_OR_LIST,
}  # fmt: skip


def tools_of(properties: dict[str, Any], required: tuple[str, ...] = (), **more: Any) -> list[Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required), **more}
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name in ("f", "ff", "g-1")
    ]


TOOLS = tools_of(PROPERTIES)


def known_of(name: str) -> tuple[Any, CallForm, ArgumentForm]:
    known = tagged_tokenizer(template=ENTRIES[name].template)
    form = form_of(known)
    assert form.arguments is not None
    return known, form, form.arguments


def rendered(known: Any, *calls: tuple[str, Any]) -> str:
    """What the template writes of calls."""
    message = {"role": "assistant", "content": None, "tool_calls": [
        {"id": f"call_{number:024}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(calls)]}  # fmt: skip
    shown, tools = constraint_of(tools=TOOLS).shown(known, [QUESTION, message])
    text = render_text(known, shown, tools, ask=False).rpartition("ab?<|im_end|>\n")[2]
    return text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


def read(form: CallForm, constraint: Constraint, text: str, step: int) -> ReadAnswer:
    reader = AnswerReader(Reading(True, None, form, constraint.values))
    parts = [text[at : at + step] for at in range(0, len(text), step)]
    pieces = [piece for part in parts for piece in reader.push(part)]

    class Given:
        push, finish_reason = staticmethod(lambda _: pieces), reader.finish_reason
        finish = reader.finish

    return read_answer("", "stop", Given())


def called(answer: ReadAnswer) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in answer.tool_calls]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def any_arguments(draw: random.Random, form: CallForm) -> dict[str, Any]:
    """Arguments of PROPERTIES, with texts that look like something else."""
    assert form.arguments is not None
    marks = [mark for mark in form.marks if form.arguments.mark not in mark]
    bits = [*marks, form.arguments.opening.strip(), '"', "\\", '{"a": [}', "}]\n", "é☃", " ", "\n",
            "</", "<", "null", "5", "<b>"]  # fmt: skip

    def text() -> str:
        return "".join(draw.choice(bits) for _ in range(draw.randint(0, 4)))

    values: dict[str, Any] = {
        "text": text(), "choice": draw.choice(["a b", "a", "c"]),
        "real": draw.choice([0, -5, 3.25, 10**12]), "yes": draw.random() < 0.5, "nothing": None,
        "object": {text(): [text(), None]}, "list": [text(), 5][: draw.randint(0, 2)],
        "maybe": draw.choice([None, "x" + text()]),
        "any": draw.choice([None, False, 5, [text()], {"a": text()}, "x" + text()]),
        "a-code": "abba", "either": draw.choice([[text()], "x" + text()]),
    }  # fmt: skip
    return {name: value for name, value in values.items() if draw.random() < 0.5}


def written(form: CallForm, calls: list[tuple[str, Any]]) -> str:
    """As the grammar has it: text that has to fit more than its type is JSON."""
    assert form.arguments is not None
    one, json_head = form.arguments, form.arguments.heads_of(())[0]
    quoted = ("a-code",) if one.typed else ("a-code", "either")

    def argument(name: str, value: Any) -> str:
        if name in quoted and isinstance(value, str):
            in_quotes = json.dumps(value, ensure_ascii=False)
            return one.opening + name + json_head + in_quotes + one.closing
        return one.written({name: value})

    text = form.closing
    for number, (name, arguments) in reversed(list(enumerate(calls))):
        before = form.opening if number == 0 else form.between
        assert before is not None
        entries = "".join(argument(*entry) for entry in arguments.items())
        head = (before + name + form.middle).replace("\ue002", str(number + 1))
        text = head + entries + text
    return text


def some_calls(form: CallForm, seed: int) -> list[tuple[str, Any]]:
    draw = random.Random(seed)
    return [
        (draw.choice(["f", "ff", "g-1"]), any_arguments(draw, form))
        for _ in range(draw.randint(1, 3))
    ]


@pytest.mark.parametrize("name", ENTRIES)
def test_the_form_is_that_of_the_template(name: str) -> None:
    known, form, _ = known_of(name)
    assert form.taken is not None
    calls = [("f", {"x": "a"}), ("ff", {"x": 5})]
    assert rendered(known, *calls).startswith(ENTRIES[name].writes)
    told = form.written([(function, json.dumps(arguments)) for function, arguments in calls])
    assert called(read(form, constraint_of(tools=TOOLS, form=form), told, 1)) == calls


@pytest.mark.parametrize("name", OTHERS)
def test_other_templates_keep_hermes_form(name: str) -> None:
    assert form_of(tagged_tokenizer(template=OTHERS[name])) == HERMES


@pytest.mark.parametrize(("name", "step"), pairs(list(ENTRIES), [1, 3, 1000]))
def test_calls_come_back_as_they_were_written(name: str, step: int) -> None:
    _, form, _ = known_of(name)
    constraint = constraint_of(tools=TOOLS, form=form)
    assert not constraint.notes
    for seed in range(25):
        calls = some_calls(form, seed)
        for content in ("", "Let me <see>. "):
            told = read(form, constraint, content + written(form, calls), step)
            assert called(told) == calls
            assert (told.content or "", told.finish_reason) == (content.rstrip(), "tool_calls")


@pytest.mark.parametrize("name", ENTRIES)
def test_what_the_template_writes_of_calls_is_read(name: str) -> None:
    known, form, _ = known_of(name)
    constraint = constraint_of(tools=TOOLS, form=form)
    same = ("text", "real", "object", "list", "yes") if ENTRIES[name].as_json else ("text",)
    for seed in range(25):
        calls = [
            (function, {key: value for key, value in arguments.items() if key in same})
            for function, arguments in some_calls(form, seed)
        ]
        assert called(read(form, constraint, rendered(known, *calls), 7)) == calls


@pytest.mark.parametrize("name", ENTRIES)
def test_an_answer_that_is_cut_has_the_beginning_of_the_arguments(name: str) -> None:
    _, form, _ = known_of(name)
    constraint = constraint_of(tools=TOOLS, form=form)
    arguments = {"text": 'a\n</b> "é"', "object": {"a": [1]}, "maybe": None}
    text = written(form, [("f", arguments)])
    whole = read(form, constraint, text, 1000).tool_calls[0]["function"]["arguments"]
    assert json.loads(whole) == arguments
    for length in range(len(form.tag), len(text)):
        cut = read(form, constraint, text[:length], 1000)
        assert not cut.content
        for call in cut.tool_calls:
            assert whole.startswith(call["function"]["arguments"])


@pytest.mark.parametrize("name", ENTRIES)
def test_the_grammar_has_the_form(name: str) -> None:
    _, form, _ = known_of(name)
    calls = [some_calls(form, seed) for seed in range(5)]
    forced = constraint_of(tools=TOOLS, form=form, tool_choice="required").grammar
    single = constraint_of(tools=TOOLS, form=form, parallel_tool_calls=False).grammar
    assert forced is not None
    assert single is not None
    for some in calls:
        text = written(form, some)
        assert accepts(forced, text), text
        assert not accepts(forced, text[: -len(form.closing.strip())])
        assert accepts(single, text) == (len(some) == 1)
    assert accepts(single, "So.")
    assert not accepts(forced, "So.")
    both = written(form, [("f", {"real": 5, "yes": True})])
    assert accepts(forced, both)
    for wrong in (both.replace("5", "x"), both.replace("real", "yes"), both.replace("f", "h", 1)):
        assert not accepts(forced, wrong) or wrong == both
    further = written(form, [("f", {"text": "a", "not_named": [1]})])
    assert accepts(forced, further)
    closed = tools_of(PROPERTIES, ("text",), additionalProperties=False)
    strict = constraint_of(tools=closed, form=form, tool_choice="required").grammar
    assert strict is not None
    assert not accepts(strict, further)
    assert accepts(strict, written(form, [("f", {"text": "a"})]))
    assert not accepts(strict, written(form, [("f", {})]))
    assert not accepts(strict, written(form, [("f", {"text": "a", "choice": "b"})]))


DEFS = {"$defs": {"Code": {"enum": ["x", "y"]}, "Deep": {"$ref": "#/$defs/Code"}}}
FORM = ArgumentForm("\n<p=", (">",) * len(TYPES), "</p>")
TYPED = FORM._replace(heads=(">t>", *[">"] * (len(TYPES) - 1)))


@pytest.mark.parametrize(
    ("schema", "untyped", "typed"),
    [
        ({"type": "string"}, Value(True), Value(True)),
        ({"type": "string", "description": "a", "x-mine": 1}, Value(True), Value(True)),
        ({"$ref": "#/$defs/Deep"}, Value(True), Value(True)),
        ({"enum": ["a", "b"]}, Value(True), Value(True)),
        ({"const": "a"}, Value(True), Value(True)),
        ({"enum": ["a</p>", "b"]}, Value(False), Value(False)),
        ({"enum": ["a", ""]}, Value(False), Value(False)),
        ({"enum": ["a", 1]}, Value(False, ("number",)), Value(False, ("number",))),
        ({"type": "string", "pattern": "a"}, Value(False), Value(False)),
        ({"type": "string", "maxLength": 3}, Value(False), Value(False)),
        ({"type": "integer"}, Value(False, ("number",)), Value(False, ("number",))),
        ({"type": ["string", "null"]}, Value(True, ("null",)), Value(True, ("null",))),
        (NULLABLE, Value(True, ("null",)), Value(True, ("null",))),
        (TEXT_OR_LIST, Value(False, ("array",)), Value(True, ("array",))),
        ({}, Value(True, TYPES[1:]), Value(True, TYPES[1:])),
        (True, Value(True, TYPES[1:]), Value(True, TYPES[1:])),
        ({"allOf": [{"type": "object"}]}, Value(False, ("object",)), Value(False, ("object",))),
        ({"anyOf": [{"const": True}, {"const": 1}]}, *[Value(False, ("number", "boolean"))] * 2),
    ],
)
def test_how_an_argument_is_written(schema: Any, untyped: Value, typed: Value) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "additionalProperties": False, **DEFS}
    for form, expected in ((FORM, untyped), (TYPED, typed)):
        found = arguments_of("tools", whole, form, strict=True)
        assert found.values == {"a": expected}
        assert found.named[0].value.text or not found.named[0].choices


def test_what_cannot_be_followed_is_noted_and_where_strict_refused() -> None:
    refers = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/a"}},
    }
    together = {"type": "object", "properties": {"a": {}}, "minProperties": 1}
    for schema, place in ((refers, "tools.properties.b: $ref"), (together, "tools: minProperties")):
        assert arguments_of("tools", schema, FORM, strict=False).notes == (
            f"{place} is not enforced",
        )
        with pytest.raises(ConfigError, match=place.replace("$", r"\$")):
            arguments_of("tools", schema, FORM, strict=True)
    for name in ("a>b", " a", "a\nb", ""):
        schema = {"type": "object", "properties": {name: {}}}
        with pytest.raises(ConfigError, match="cannot be written"):
            arguments_of("tools", schema, FORM, strict=False)


CODE, NUMBER = {"enum": [1, 2]}, {"type": "integer"}


@pytest.mark.parametrize(
    ("parts", "definitions", "right", "wrong"),
    [
        ({"a": {"$ref": "#/$defs/x~1y%25"}}, {"x/y%": CODE}, "1", "3"),
        ({"a": {"$ref": "#/$defs/B"}}, {"A": CODE, "B": {"$ref": "#/$defs/A"}}, "2", "3"),
        # What an argument does not refer to does not matter.
        ({"a": CODE, "b": NUMBER}, {"A": {"$ref": "#/properties/b"}}, "1", "3"),
        # References are to the whole schema, not to definitions of the argument's own.
        ({"a": {"type": "array", "items": {"$ref": "#/$defs/A"}, "$defs": {"A": NUMBER}}},
         {"A": CODE}, "[1]", "[3]"),
        # Properties may have the names of keywords.
        ({"a": {"type": "object", "properties": {"const": {"$ref": "#/$defs/A"}}}},
         {"A": CODE}, '{"const": 1}', '{"const": 3}'),
        ({"a": {"const": {"$ref": "#/b"}}}, {}, '{"$ref": "#/b"}', '{"$ref": "#/c"}'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keyword", ["$defs", "definitions"])
def test_an_argument_refers_to_definitions(
    keyword: str, parts: Any, definitions: Any, right: str, wrong: str
) -> None:
    given = json.loads(json.dumps(parts).replace("$defs", keyword))
    tools = tools_of(given, ("a",), **{keyword: definitions}, additionalProperties=False)
    tools = json.loads(json.dumps(tools).replace("#/$defs", f"#/{keyword}"))
    for name in ENTRIES:
        _, form, _ = known_of(name)
        called_by = constraint_of(tools=tools, form=form, tool_choice="required")
        assert called_by.notes == ()
        assert called_by.grammar is not None
        for value, allowed in ((right, True), (wrong, False)):
            text = written(form, [("f", {"a": json.loads(value)})])
            assert accepts(called_by.grammar, text) == allowed, text


@pytest.mark.parametrize("key", ["properties", "items", "anyOf"])
def test_references_to_other_arguments_are_not_followed_wherever_they_stand(key: str) -> None:
    """Not even below a property that has a keyword's name."""
    other = {"$ref": "#/properties/b"}
    inner = {"properties": {"enum": other}, "items": {"items": other}, "anyOf": [other]}[key]
    tools = tools_of({"a": {"type": ["object", "array"], key: inner}, "b": NUMBER})
    _, form, _ = known_of("qwen coder")
    called_by = constraint_of(tools=tools, form=form, tool_choice="required")
    places = [f"tools[{n}].function.parameters.properties.a: $ref" for n in range(len(tools))]
    assert called_by.notes == tuple(f"{place} is not enforced" for place in places)
    assert called_by.grammar is not None
    assert begun_fault_of(called_by.grammar) is None


def test_arguments_beside_a_reference_at_the_top_are_named() -> None:
    schema = {"type": "object", "$ref": "#/$defs/A", "required": ["b"],
              "properties": {"b": NUMBER}, "$defs": {"A": {"type": "object"}}}  # fmt: skip
    assert arguments_of("tools", schema, FORM, strict=False).notes == (
        "tools: properties is not enforced",
        "tools: required is not enforced",
    )
    with pytest.raises(ConfigError, match="tools: properties cannot be followed"):
        arguments_of("tools", schema, FORM, strict=True)


def test_words_of_the_templates_own_are_read_as_json() -> None:
    """As earlier calls have them in the prompt, and so as the model may write them."""
    properties = {"yes": {"type": "boolean"}, "nothing": {"type": "null"}, "one": {"const": True},
                  "list": {"type": ["array", "boolean"]}}  # fmt: skip
    for name in ("qwen coder", "seed", "glm"):
        known, form, _ = known_of(name)
        constraint = constraint_of(tools=tools_of(properties), form=form, tool_choice="required")
        assert constraint.grammar is not None
        calls = [("f", {"yes": True, "nothing": None, "list": False}), ("ff", {"yes": False})]
        text = rendered(known, *calls)
        assert ("True" in text) == (name != "glm")
        for one in (text, written(form, calls)):
            assert accepts(constraint.grammar, one), one
            assert called(read(form, constraint, one, 1)) == calls
        for wrong in (text.replace("None", "False"), text.replace("True", "TRUE"),
                      rendered(known, ("f", {"one": False}))):  # fmt: skip
            assert not accepts(constraint.grammar, wrong) or wrong == text


def test_references_at_the_top_and_required_names_without_a_schema() -> None:
    every = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "b"]}
    schema = {"$ref": "#/$defs/All", "type": "object", "$defs": {"All": every}}
    found = arguments_of("tools", schema, FORM, strict=True)
    assert [(one.name, one.required) for one in found.named] == [("a", True), ("b", True)]


SERVED = tools_of({"x": {"type": "boolean"}, "y": {"type": "string"}}, ("x", "y"),
                  additionalProperties=False)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "special"), pairs(list(ENTRIES), [True, False]))
def test_served(name: str, special: bool) -> None:
    """Of the model's own accord and as asked for; calls and results go back."""
    _, form, _ = known_of(name)
    calls = [("ff", {"x": True, "y": "a <b>"}), ("f", {"x": False, "y": ""})]
    marks = ENTRIES[name].marks if special else ()
    known = tagged_tokenizer(template=ENTRIES[name].template, special=marks)
    shown, tools = constraint_of(tools=SERVED, form=form).shown(known, [QUESTION])
    text, template = written(form, calls), ENTRIES[name].template
    check_served(text, calls, template, marks, SERVED, shown, tools)
