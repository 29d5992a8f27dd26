"""Schemas from Python and the command line are followed as the server follows strict ones."""

import json
from typing import Any

import pytest
from support.serving.grammars import PADDED, STOPS, accepts, tokenizer

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.accept.grammar import grammar_mask
from medusa_kit.infer.decode.grammars.check import check_grammar, exactly
from medusa_kit.serve.calls.tools import constraint_of
from medusa_kit.settings.grammar import Grammar

NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
EITHER = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]}


def server(schema: dict[str, Any], **more: Any) -> Grammar | None:
    fields = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}
    return constraint_of(fields).grammar


@pytest.mark.parametrize(
    "part",
    [
        {"const": 2**53 + 1}, {"enum": [-(2**60) - 1]}, {"type": "integer", "minimum": 2**64 - 1},
        {"$ref": "#/properties/a"}, {"$ref": "https://example.com/s"}, {"not": {}},
        {"pattern": "(?=a)b"}, EITHER,
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_as_by_the_server(part: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"]}
    with pytest.raises(ConfigError) as strict:
        server(schema, strict=True)
    with pytest.raises(ConfigError) as own:
        check_grammar(Grammar.json_schema(schema))
    assert own.value.message.startswith("schema.properties.a: the JSON schema cannot be used: ")
    rules = f'start: "%json {{" part // %json 1\npart: %json\n {json.dumps(schema)} "}}"'
    with pytest.raises(ConfigError) as inside:
        check_grammar(Grammar.lark(rules))
    assert inside.value.message == own.value.message.replace("schema", "schema in line 2", 1)
    assert strict.value.message == f"response_format.json_schema.{own.value.message}"


@pytest.mark.parametrize(
    "rules",
    [
        'A: /a\n"/\nstart: A "x" %json {part}',
        'A: /"\n\n[b"]/i\nstart: A "//" A %json {part}',
        '# it"s\nA: /\\/\n#"/\nstart: A %json{part}',
    ],
)
def test_schemas_behind_expressions_of_several_lines_are_checked(rules: str) -> None:
    wrong, fine = (rules.replace("{part}", json.dumps({"const": n})) for n in (2**53 + 1, 5))
    line = rules.count("\n") + 1
    with pytest.raises(ConfigError, match=f"schema in line {line}: .* cannot be followed exactly"):
        check_grammar(Grammar.lark(wrong))
    check_grammar(Grammar.lark(fine))


@pytest.mark.parametrize(
    "written", ['{"const": 1, "const": 2}', '{"properties": {"a": {}, "b": {}, "\\u0061": {}}}']
)
def test_a_key_is_given_once(written: str) -> None:
    """JSON's parsers keep the last without a word."""
    for make in (Grammar.json_schema, lambda text: Grammar.lark(f"start: %json {text}")):
        with pytest.raises(ConfigError, match=r"the key '(const|a)' is given twice\nhint: keep"):
            check_grammar(make(written))


def test_one_that_is_nested_too_deeply_is_refused() -> None:
    for depth in (150, 450):
        schema = '{"items":' * depth + "{}" + "}" * depth
        with pytest.raises(ConfigError, match=r"recursion limit exceeded|nested too deeply"):
            check_grammar(Grammar.json_schema(schema))


def test_a_name_written_with_escapes_has_its_own_schema() -> None:
    grammar = Grammar.json_schema({**NAMED, "x-guidance": {"whitespace_flexible": False}})
    mask = grammar_mask(grammar, tokenizer(), PADDED, frozenset(STOPS), 0)
    for text, allowed in (('{"a":1}', True), ('{"b":"s"}', True), ('{"\\u0061":"s"}', False)):
        assert mask.allows(tokenizer()(text).input_ids) == allowed, text
        assert accepts(exactly(grammar), text) == allowed


def test_a_schema_inside_of_a_grammar_is_followed_alike() -> None:
    schema = json.dumps({**NAMED, "x-guidance": {"whitespace_flexible": False}})
    grammar = Grammar.lark(f'start: "%json " (one | other)\none: %json {schema}\nother: /%json 1/')
    mask = grammar_mask(grammar, tokenizer(), PADDED, frozenset(STOPS), 0)
    for text, allowed in (
        ('%json {"a":1}', True), ('%json {"b":"s"}', True), ('%json {"\\u0061":"s"}', False),
        ("%json %json 1", True),
    ):  # fmt: skip
        assert mask.allows(tokenizer()(text).input_ids) == allowed, text
    for rules in ("start: %json {", 'start: "a"', "start: %json true"):
        assert exactly(Grammar.lark(rules)).text == rules


def test_options_of_a_schema_hold() -> None:
    check_grammar(Grammar.json_schema({**EITHER, "x-guidance": {"coerce_one_of": True}}))
    check_grammar(Grammar.json_schema({"not": {}, "x-guidance": {"lenient": True}}))


def test_what_the_server_has_looked_at_stays_as_it_is() -> None:
    grammar = server(EITHER)
    assert grammar is not None
    assert exactly(grammar) is grammar
    check_grammar(grammar)
