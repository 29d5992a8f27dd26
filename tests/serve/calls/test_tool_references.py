"""A tool's schema means what the same schema of an answer means: references hold as they are, and
what only looks like one is data."""

import json
from typing import Any

import pytest
from support.serving.grammars import accepts

from medusa_kit.serve.calls.tools import constraint_of


def within(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"],
            "additionalProperties": False}  # fmt: skip


A = {"$ref": "#/$defs/A"}
P = {"enum": ["p"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"$id": "https://e.org/t", **within(A), "$defs": {"A": P}}, {"a": "p"}, {"a": "q"}),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "id": "https://e.org/t",
          **within({"$ref": "#/definitions/A"}), "definitions": {"A": P}}, {"a": "p"}, {"a": "q"}),
        (within({"const": {"$ref": "#/x"}}), {"a": {"$ref": "#/x"}},
         {"a": {"$ref": "#/properties/arguments/x"}}),
        (within({"enum": [1, [{"$ref": "#"}]]}), {"a": [{"$ref": "#"}]}, {"a": [{"$ref": "x"}]}),
        ({**within({**P, "default": {"$ref": "#/x"}, "examples": [A]})}, {"a": "p"}, {"a": "q"}),
        ({"type": "object", "properties": {"const": A, "enum": A, "$ref": A}, "$defs": {"A": P},
          "required": ["const", "enum", "$ref"], "additionalProperties": False},
         {"const": "p", "enum": "p", "$ref": "p"}, {"const": "p", "enum": "p", "$ref": "q"}),
        ({**within({"$ref": "#/$defs/a~1b~0c%25d"}), "$defs": {"a/b~c%d": P}},
         {"a": "p"}, {"a": "q"}),
        ({**within({"type": "array", "items": {"$ref": "#/properties/b"}}), "required": ["a"],
          "properties": {"a": {"type": "array", "items": {"$ref": "#/properties/b"}}, "b": P}},
         {"a": ["p"]}, {"a": ["q"]}),
        ({**within({"$ref": "#"}), "required": []}, {"a": {"a": {}}}, {"b": 1}),
    ],
)  # fmt: skip
def test_a_tools_schema_means_what_that_of_an_answer_does(
    schema: dict[str, Any], right: Any, wrong: Any
) -> None:
    for is_strict in (False, True):
        described = {"name": "f", "schema": schema, "strict": is_strict}
        function = {"name": "f", "parameters": schema, "strict": is_strict}
        form = constraint_of({"type": "json_schema", "json_schema": described})
        tools = [{"type": "function", "function": function}]
        call = constraint_of(tools=tools, tool_choice="required")
        assert form.notes == call.notes == ()
        for value, allowed in ((right, True), (wrong, False)):
            text = json.dumps(value)
            called = f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
            assert form.grammar is not None
            assert call.grammar is not None
            assert accepts(form.grammar, text) == allowed
            assert accepts(call.grammar, called) == allowed
