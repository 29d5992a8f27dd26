"""Schemas of which llguidance cannot follow a part: that part is named, and the rest holds."""

import json
import time
from typing import Any

import pytest
from support.serving.grammars import accepts

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.grammars import schemas
from medusa_kit.infer.decode.grammars.joined_patterns import max_joined
from medusa_kit.infer.decode.grammars.schemas import usable
from medusa_kit.infer.decode.grammars.source import begun_fault_of
from medusa_kit.serve.calls.tools import constraint_of
from medusa_kit.settings.grammar import Grammar

AHEAD = "^(?=.*[0-9]).{8,}$"
PARTS: dict[str, Any] = {
    "a look-ahead": {"type": "string", "pattern": AHEAD},
    "a back reference": {"type": "string", "pattern": r"^(['\"]).*\1$"},
    "no expression": {"type": "string", "pattern": "(a"},
    "no text": {"type": "string", "pattern": 5},
    "a huge count": {"type": "string", "pattern": "^a{100000000}$"},
    "huge counts": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "a number that is none": {"type": "string", "minLength": 1e30},
    "nothing fits": {"type": "string", "minLength": 1, "maxLength": 0},
    "two that nothing fits": {"type": "string", "pattern": "^x$", "format": "date"},
    "a format": {"type": "string", "format": "colour"},
    "not": {"not": {"type": "object"}, "type": "string"},
    "if": {"type": "string", "if": {"minLength": 2}, "then": {"maxLength": 3}},
    "uniqueItems": {"type": ["string", "array"], "uniqueItems": True},
    "too large a multiple": {"type": ["string", "integer"], "multipleOf": 7919 * 104729},
    "a reference": {"$ref": "#/$defs/none"},
    "another document": {"$ref": "http://127.0.0.1/x"},
    "kinds that exclude one another": {"allOf": [{"type": "string"}, {"type": "number"}]},
    "required is no list": {"type": ["string", "object"], "required": True},
}
SOUND = {"type": "integer", "minimum": 3}


def lenient(schema: dict[str, Any]) -> tuple[Grammar, tuple[str, ...]]:
    found = usable("at", schema, strict=False)
    tight = {"whitespace_flexible": False}
    return Grammar.json_schema({**found.schema, "x-guidance": tight}), found.notes


@pytest.mark.parametrize("kind", PARTS)
def test_what_cannot_be_followed_is_left_out_where_it_is(kind: str) -> None:
    schema = {"type": "object", "required": ["to", "n"], "additionalProperties": False,
              "properties": {"to": PARTS[kind], "n": SOUND}}  # fmt: skip
    grammar, notes = lenient(schema)
    assert notes
    assert all(note.startswith("at.properties.to: ") for note in notes)
    assert accepts(grammar, '{"to":"x","n":3}')
    for wrong in ('{"to":"x","n":2}', '{"to":"x"}', '{"to":"x","n":3,"m":1}', '{"n":3}'):
        assert not accepts(grammar, wrong)
    with pytest.raises(ConfigError, match=r"^at\.properties\.to: the JSON schema cannot be used"):
        usable("at", schema, strict=True)


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("items", {"type": "array", "items": PARTS["a look-ahead"]}),
        ("prefixItems[1]", {"type": "array", "prefixItems": [SOUND, PARTS["not"]]}),
        ("anyOf[1]", {"anyOf": [SOUND, PARTS["a format"]]}),
        ("oneOf[0]", {"oneOf": [PARTS["a look-ahead"], SOUND]}),
        ("allOf[0].properties.a", {"allOf": [{"properties": {"a": PARTS["a look-ahead"]}}]}),
        ("additionalProperties", {"additionalProperties": PARTS["a huge count"]}),
        ("patternProperties.%5Ea", {"patternProperties": {"^a": PARTS["a look-ahead"]}}),
        ("$defs.b", {"$ref": "#/$defs/b", "$defs": {"b": PARTS["a look-ahead"]}}),
        ("$defs.b.properties.c.items",
         {"$ref": "#/$defs/b", "$defs": {"b": {"type": "object", "properties": {
             "c": {"type": "array", "items": PARTS["a look-ahead"]},
             "d": {"$ref": "#/$defs/b"}}}}}),
        ("properties.a%20b%3A.properties.c",
         {"properties": {"a b:": {"properties": {"c": PARTS["a look-ahead"]}}}}),
    ],
)  # fmt: skip
def test_it_is_found_wherever_it_is(path: str, schema: dict[str, Any]) -> None:
    found = usable("at", schema, strict=False)
    assert [note.partition(": ")[0] for note in found.notes] == [f"at.{path}"]
    with pytest.raises(ConfigError) as caught:
        usable("at", schema, strict=True)
    assert caught.value.message.startswith(f"at.{path}: ")


@pytest.mark.parametrize("place", ["properties", "$defs"])
def test_alternatives_that_cannot_be_told_apart_are_any_of_them_unless_strict(place: str) -> None:
    either = {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}]}
    schema = {"type": "object", place: {"a": either}, "required": ["a"]}
    if place == "$defs":
        schema["properties"] = {"a": {"$ref": "#/$defs/a"}}
    described = {"name": "n", "schema": schema}
    call = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = constraint_of({"type": "json_schema", "json_schema": described})
    for asked in (form, constraint_of(tools=[call], tool_choice="required")):
        assert asked.grammar is not None
        assert asked.notes == ()
        assert begun_fault_of(asked.grammar) is None
    assert form.grammar is not None
    assert accepts(form.grammar, '{"a": "ax"}')
    assert not accepts(form.grammar, '{"a": "x"}')
    with pytest.raises(ConfigError, match="oneOf constraints are not supported"):
        constraint_of({"type": "json_schema", "json_schema": {**described, "strict": True}})


def test_what_is_left_out_narrows_nothing() -> None:
    """What no longer has a name of its own would be forbidden by additionalProperties."""
    schema = {"type": "object", "patternProperties": {"^(?=a)": SOUND, "^b": SOUND},
              "additionalProperties": False}  # fmt: skip
    grammar, notes = lenient(schema)
    assert len(notes) == 1
    assert accepts(grammar, '{"a":"x","b":3}')
    assert not accepts(grammar, '{"b":2}')


def test_other_drafts_are_read_as_they_are() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
              "items": [SOUND, PARTS["a look-ahead"]], "additionalItems": False}  # fmt: skip
    grammar, notes = lenient(schema)
    assert notes == ("at.items[1]: pattern is not enforced",)
    assert accepts(grammar, '[3,"x"]')
    assert not accepts(grammar, '[3,"x",1]')
    unknown = lenient({"$schema": "http://127.0.0.1/none", **SOUND})
    assert unknown[1] == ("at: $schema is not enforced",)
    assert not accepts(unknown[0], "2")


def test_what_can_be_followed_stays_as_it_is() -> None:
    schema = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "type": "object", "required": ["node"], "additionalProperties": False,
        "properties": {
            "node": {"$ref": "#/$defs/node"}, "mail": {"type": "string", "format": "email"},
            "$ref": {"type": "string"}, "k": {"enum": [{"$ref": "x"}]}, "never": False,
            "self": {"$ref": "#"}, "first": {"$ref": "#/properties/mail"},
        },
    }  # fmt: skip
    for strict in (True, False):
        found = usable("at", schema, strict)
        assert {**found.schema, "x-guidance": None} == {**schema, "x-guidance": None}
        assert found.notes == ()


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"type": "x"}}}, r"^at\.properties\.a: .*Invalid type: x"),
        ({"properties": 5}, r"^at: .*\(properties\)"),
        ({"x-guidance": 5}, r"at\.x-guidance 5: expected an object"),
        ({"x-guidance": {"whitespace_pattern": "("}}, r"at\.x-guidance: .*unclosed group"),
    ],
)
def test_what_is_no_schema_is_refused_in_any_case(schema: Any, said: str) -> None:
    for strict in (False, True):
        with pytest.raises(ConfigError, match=f"(?s){said}"):
            usable("at", schema, strict)


def test_what_only_its_parts_together_exclude_is_named_as_a_whole() -> None:
    both = {"$ref": "#/$defs/n", "type": "string"}
    schema = {"type": "object", "properties": {"a": both}, "required": ["a"],
              "$defs": {"n": SOUND}}  # fmt: skip
    found = usable("at", schema, strict=False)
    assert found.notes == ("at: all of it is not enforced",)
    with pytest.raises(ConfigError, match=r"^at: the JSON schema cannot be used"):
        usable("at", schema, strict=True)


def test_constraints_say_what_they_leave_out() -> None:
    parameters = {"properties": {"to": PARTS["a look-ahead"]}}
    function = {"name": "send", "parameters": parameters}
    form = {"type": "json_schema",
            "json_schema": {"name": "n", "strict": False, "schema": parameters}}  # fmt: skip
    asked = constraint_of(form, [{"type": "function", "function": function}])
    assert asked.notes == (
        "response_format.json_schema.schema.properties.to: pattern is not enforced",
        "tools[0].function.parameters.properties.to: pattern is not enforced",
    )


def test_a_schema_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents send the same tools with each request."""
    schema = {"type": "string", "pattern": f"^{time.monotonic_ns()}$"}
    first = usable("at", schema, strict=True)
    monkeypatch.setattr("medusa_kit.infer.decode.grammars.schemas.fault_of", None)
    assert usable("at", json.loads(json.dumps(schema)), strict=True) == first


def joined(number: int) -> dict[str, Any]:
    return {"allOf": [{"pattern": f".*{chr(97 + place)}.*"} for place in range(number)]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", **joined(26)},
        {"type": "string", "allOf": 3 * [joined(3)]},
        {"allOf": [{"properties": {"a": one}} for one in joined(20)["allOf"]]},
        {"allOf": [{"items": {"anyOf": [one, {"type": "null"}]}} for one in joined(20)["allOf"]]},
        {"$ref": "#/$defs/0", "$defs": {
            str(n): {"pattern": f".*{n}.*", "$ref": f"#/$defs/{n + 1}"} for n in range(20)}
            | {"20": {"type": "string"}}},
    ],
)  # fmt: skip
def test_patterns_of_one_text_are_few(schema: dict[str, Any], monkeypatch: Any) -> None:
    """llguidance would take minutes and gigabytes, so it is not asked."""
    asked: list[Grammar] = []
    original = schemas.fault_of
    monkeypatch.setattr(schemas, "fault_of", lambda g, *more: asked.append(g) or original(g, *more))
    for strict in (False, True):
        with pytest.raises(ConfigError, match=r"^at.* fit [0-9]+ patterns; expected 8 at most"):
            usable("at", {**schema, "title": f"{strict}"}, strict)
    assert max(max_joined(one := json.loads(grammar.text), one) for grammar in asked) <= 8


def test_patterns_of_several_texts_may_be_many() -> None:
    texts = [{"type": "string", "pattern": f"^{n}$"} for n in range(30)]
    many = {
        "anyOf": texts[:15],
        "allOf": [{"properties": {f"p{n}": one for n, one in enumerate(texts[15:])}}],
    }
    assert usable("at", many, strict=True).notes == ()
