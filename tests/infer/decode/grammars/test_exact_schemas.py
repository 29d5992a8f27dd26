"""What a schema says is followed to the letter, or refused with its place: numbers, names written
with escapes, references that lead back to themselves."""

import json
from typing import Any

import pytest
from support.serving.grammars import accepts

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.grammars.schemas import usable
from medusa_kit.settings.grammar import Grammar

BIG = 2**53 + 1
TIGHT = {"whitespace_flexible": False}


def strict(schema: dict[str, Any]) -> Grammar:
    found = usable("at", {**schema, "x-guidance": TIGHT}, strict=True)
    return Grammar.json_schema(found.schema)


def within(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"],
            "additionalProperties": False}  # fmt: skip


def lenient_notes(schema: dict[str, Any]) -> tuple[str, ...]:
    return usable("at", schema, strict=False).notes


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ({"const": BIG}, "const"), ({"const": -BIG}, "const"), ({"const": 10**25}, "const"),
        ({"const": 1e25}, "const"), ({"const": 10**400}, "const"),
        ({"type": "integer", "const": 2**63}, "const"),
        ({"enum": ["a", None, BIG, 1.5]}, "enum"), ({"enum": [[1, [BIG]]]}, "enum"),
        ({"const": {"b": [{"c": -BIG}]}}, "const"),
        ({"type": "integer", "minimum": BIG}, "minimum"),
        ({"type": "integer", "maximum": -BIG}, "maximum"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum"),
        ({"type": "integer", "exclusiveMaximum": BIG}, "exclusiveMaximum"),
        ({"type": "integer", "minimum": 1e19}, "minimum"),
        ({"type": "integer", "maximum": 2**64 - 1}, "maximum"),
        ({"type": ["integer", "null"], "minimum": BIG}, "minimum"),
        ({"type": "number", "minimum": BIG}, "minimum"),
        ({"type": "number", "exclusiveMaximum": 2**63 - 1}, "exclusiveMaximum"),
        ({"type": "number", "maximum": 10**400}, "maximum"),
        ({"type": "integer", "multipleOf": BIG}, "multipleOf"),
    ],
)  # fmt: skip
def test_numbers_that_would_be_others_are_refused(part: dict[str, Any], key: str) -> None:
    for place, schema in (
        ("at.properties.a", within(part)),
        ("at.$defs.n", {**within({"$ref": "#/$defs/n"}), "$defs": {"n": part}}),
        ("at.properties.a.items", within({"type": "array", "items": part})),
    ):
        with pytest.raises(ConfigError) as caught:
            usable("at", schema, strict=True)
        assert caught.value.message.startswith(f"{place}: the JSON schema cannot be used: ")
        assert caught.value.message.endswith(f"({key})")
        assert lenient_notes(schema) == (f"{place}: {key} is not enforced",)


@pytest.mark.parametrize(
    ("part", "right", "wrong"),
    [
        ({"const": 2**53 - 1}, [2**53 - 1], [2**53]),
        ({"enum": [-5, "a", 1.5, [2]]}, [-5, "a", 1.5, [2]], [5, 2, "b"]),
        ({"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1},
         [2**53 - 1, 1 - 2**53], [2**53, -(2**53)]),
        ({"type": "integer", "minimum": -(2**62), "maximum": 2**63 - 1},
         [2**63 - 1, -(2**62), BIG], [2**63, -(2**62) - 1]),
        ({"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4}, [2, 3], [1, 4]),
        ({"type": "number", "minimum": -1e3, "maximum": 0.3}, [-1000, 0.3, 0.25], [0.31, -1001]),
        ({"type": "integer", "multipleOf": 3, "minimum": -3}, [-3, 0, 9], [-6, 4]),
    ],
)  # fmt: skip
def test_other_numbers_are_followed(part: Any, right: list[Any], wrong: list[Any]) -> None:
    grammar = strict(within(part))
    for values, allowed in ((right, True), (wrong, False)):
        for value in values:
            text = json.dumps({"a": value}, separators=(",", ":"))
            assert accepts(grammar, text) == allowed, text


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    "others", [{}, {"additionalProperties": TEXT}, {"patternProperties": {"^xo": TEXT}}]
)
@pytest.mark.parametrize("name", ["a", "é", "l\n", "a/b~c", "𝄞", 'q"', "x"])
def test_a_name_written_with_escapes_has_its_own_schema(name: str, others: Any) -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, **others}
    inner = {"type": "array", "items": schema}
    escaped = "".join(f"\\u{unit:04x}" for unit in units(name))
    for grammar, around in ((strict(schema), "%s"), (strict(within(inner)), '{"a":[%s]}')):
        assert accepts(grammar, around % json.dumps({name: 1}, ensure_ascii=False).replace(" ", ""))
        for written in {escaped, escaped.upper().replace("U", "u"), escaped[:6] + name[1:]}:
            assert not accepts(grammar, around % f'{{"{written}":"s"}}')
        assert accepts(grammar, around % '{"xother":"s"}')


def units(text: str) -> list[int]:
    data = text.encode("utf-16-be")
    return [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]


def test_escapes_of_values_stay_where_all_names_are_known() -> None:
    assert accepts(strict(within({"type": "string"})), '{"a":"\\u0001"}')
    assert accepts(strict(within({"const": "\1"})), '{"a":"\\u0001"}')
    is_open = {**within({"enum": ["\1"]}), "additionalProperties": True}
    with pytest.raises(ConfigError, match=r"^at\.properties\.a: .*control character.*\(enum\)"):
        usable("at", is_open, strict=True)
    assert lenient_notes(is_open) == ()


A = {"$ref": "#/$defs/A"}
B = {"$ref": "#/$defs/B"}


@pytest.mark.parametrize(
    ("defs", "place"),
    [
        ({"A": A}, "at.properties.a"),
        ({"A": B, "B": {"$ref": "#/$defs/C"}, "C": A}, "at.properties.a"),
        ({"A": {"anyOf": [A, B]}, "B": A}, "at.properties.a"),
        ({"A": {"allOf": [A, {"type": "integer"}]}}, "at.properties.a"),
        ({"A": within(A)}, "at.properties.a"),
        ({"A": within(B), "B": {"type": "array", "items": A, "minItems": 1}}, "at.properties.a"),
        ({"A": {"type": "array", "prefixItems": [A], "minItems": 1}}, "at.properties.a"),
        ({"A": {"type": "integer"}, "B": within({"$ref": "#/$defs/B"})}, "at.$defs.B.properties.a"),
    ],
)  # fmt: skip
def test_circles_without_an_end_are_refused(defs: dict[str, Any], place: str) -> None:
    for schema in (
        {**within(A), "$defs": defs},
        {"type": "object", "properties": {"b": {"type": "string"}, "a": A}, "$defs": defs},
    ):
        with pytest.raises(ConfigError, match="leads back to itself") as caught:
            usable("at", schema, strict=True)
        assert caught.value.message.startswith(f"{place}: ")
        assert all("$ref is not enforced" in note for note in lenient_notes(schema))


@pytest.mark.parametrize(
    ("definition", "value"),
    [
        ({"anyOf": [A, {"type": "integer"}]}, 1),
        ({**within(A), "required": []}, {"a": {"a": {}}}),
        (within({"anyOf": [A, {"type": "null"}]}), {"a": {"a": None}}),
        ({"type": "array", "items": A}, [[], [[]]]),
    ],
)
def test_circles_that_end_are_followed(definition: Any, value: Any) -> None:
    grammar = strict({**within(A), "$defs": {"A": definition}})
    assert accepts(grammar, json.dumps({"a": value}, separators=(",", ":")))


TYPED = {"type": "object"}


@pytest.mark.parametrize(
    ("defs", "place"),
    [
        ({"A": within({**A, **TYPED})}, "at.$defs.A.properties.a"),
        ({"A": {"type": "array", "items": {**A, "minItems": 1}}}, "at.$defs.A.items"),
        ({"A": within({"anyOf": [{**A, **TYPED}, {"type": "null"}]})},
         "at.$defs.A.properties.a.anyOf[0]"),
        ({"A": within({"anyOf": [{**B, **TYPED}, {"type": "null"}]}),
          "B": within({"anyOf": [{**A, **TYPED}, {"type": "null"}]})},
         "at.$defs.A.properties.a.anyOf[0]"),
    ],
)  # fmt: skip
def test_circles_beside_other_keywords_are_refused_at_their_place(
    defs: dict[str, Any], place: str
) -> None:
    for one in defs.values():
        one.pop("required", None)
    schema = {**within(A), "$defs": defs}
    with pytest.raises(ConfigError, match="leads back to this place") as caught:
        usable("at", schema, strict=True)
    assert caught.value.message.startswith(f"{place}: ")
    assert "json-schema:" not in caught.value.message
    notes = lenient_notes(schema)
    assert f"{place}: $ref is not enforced" in notes
    assert not any("all of it" in note for note in notes)


def test_circles_that_are_not_put_in_place_are_followed() -> None:
    for inner in (A, {**A, "description": "the next"}, {**B, **TYPED}):
        defs = {"A": {**within(inner), "required": []}, "B": {**within(A), "required": []}}
        grammar = strict({**within(A), "$defs": defs})
        assert accepts(grammar, '{"a":{"a":{"a":{}}}}')
        assert not accepts(grammar, '{"a":{"a":1}}')


def test_references_by_the_schemas_own_id_are_followed() -> None:
    own = "https://example.com/s"
    schema = {"$id": own, **within({"$ref": f"{own}#/$defs/A"}), "$defs": {"A": {"type": "null"}}}
    assert accepts(strict(schema), '{"a":null}')
    assert not accepts(strict(schema), '{"a":1}')
    nested = {"$id": own, **within({"$ref": own}), "required": []}
    assert accepts(strict(nested), '{"a":{"a":{}}}')
    with pytest.raises(ConfigError, match=r"^at\.properties\.a: .*no 'https://example.com/t'"):
        usable("at", {"$id": own, **within({"$ref": "https://example.com/t"})}, strict=True)
    with pytest.raises(ConfigError, match="leads back to itself"):
        usable("at", {"$id": own, **within({"$ref": own})}, strict=True)
