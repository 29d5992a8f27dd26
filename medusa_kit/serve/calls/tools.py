"""`response_format`, `tools` and `tool_choice` of a request: what is rendered, and the grammar that
the answer follows. tool_calls.py reads the answer.

A call is written as the chat template writes it (template_calls.py), else as Hermes and Qwen do:
`<tool_call>`, a line of JSON with `name` and `arguments`, `</tool_call>`. Where the template does
not show tools, or no calls, a system message names them.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_kit.data.chat import encode_prompt
from medusa_kit.data.template import NOTHING, chat_template, render, render_text
from medusa_kit.errors import ConfigError, DataError, unknown_value
from medusa_kit.infer.decode.grammars.schemas import OPTIONS, Usable, usable
from medusa_kit.serve.calls.argument_form import Value
from medusa_kit.serve.calls.argument_schemas import entries_of
from medusa_kit.serve.calls.call_form import HERMES, CallForm
from medusa_kit.serve.calls.call_grammar import calls_grammar
from medusa_kit.serve.calls.template_calls import form_of
from medusa_kit.serve.calls.tool_messages import Message, as_text, for_template, with_system
from medusa_kit.settings.grammar import JSON_OBJECT, Grammar

FORMATS = ("text", "json_object", "json_schema")
CHOICES = ("auto", "none", "required")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Some models would write space for ever. Callers may say otherwise, by `x-guidance` in a schema.
INDENTED, ONE_LINE = "[ \\t\\n\\r]{0,32}", " ?"
MAX_TOOLS = 128  # OpenAI's limit
INSTRUCTIONS = (
    "You may call functions. These are there, described in JSON:\n<tools>\n{tools}\n</tools>\n"
    "For each call, write the function's name and {how}:\n{call}"
)
AS_JSON, ONE_BY_ONE = "arguments as JSON between tags", "each argument between tags"
EXAMPLE = "the function", '{"argument": "value"}'


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What a request asks of its answer. `tools`: that the model is shown, none where it may not
    call any."""

    grammar: Grammar | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    notes: tuple[str, ...] = ()  # what of the schemas is not enforced
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the template
    # How arguments are written, by function and name, where they are written one by one.
    values: Mapping[str, Mapping[str, Value]] = dataclasses.field(default_factory=dict)

    @property
    def calls(self) -> bool:
        """Whether the answer may have calls, and so is read for them."""
        return bool(self.tools)

    @property
    def field(self) -> str | None:
        """The request's field that asks for the grammar."""
        if self.grammar is None:
            return None
        return "tools" if self.tools else "response_format"

    def encode(self, tokenizer: Any, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation, ready for the answer. Raises ConfigError where tools need
        a template, DataError where the template refuses."""
        given, tools = self.shown(tokenizer, messages)
        return encode_shown(tokenizer, given, tools, self.variables)

    def shown(
        self, tokenizer: Any, messages: Sequence[Message]
    ) -> tuple[list[Message], Sequence[Mapping[str, Any]] | None]:
        """(messages, tools) as the chat template gets them. Raises what `encode` does."""
        form = form_of(tokenizer)
        messages = self._with_words(tokenizer, messages, form)
        given = as_text(messages, form)
        if form.taken is not None:
            own = for_template(messages, form.taken, form)
            tools = self.tools if form.taken.tools else ()
            if (own == given and not tools) or self._renders(tokenizer, own, tools):
                given = own
                if not self.tools or tools:
                    return own, tools or None
        if not self.tools:
            return given, None
        if not chat_template(tokenizer):
            raise ConfigError(
                "tools need a chat template, which this base's tokenizer lacks",
                hint="use a model with one, or ask without tools",
            )
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.tools)
        how = AS_JSON if form.arguments is None else ONE_BY_ONE
        instructions = INSTRUCTIONS.format(tools=listed, how=how, call=form.written([EXAMPLE]))
        shown = with_system(given, instructions)
        if not self._renders(tokenizer, shown):  # some templates have no system messages
            shown = with_system(given, instructions, role="user")
        return shown, None

    def _with_words(
        self, tokenizer: Any, messages: Sequence[Message], form: CallForm
    ) -> Sequence[Message]:
        """Empty answers, as a stop string may have left them, as a space where the template refuses
        them."""
        if not any(map(_is_empty, messages)) or self._renders(tokenizer, as_text(messages, form)):
            return messages
        return [{**one, "content": " "} if _is_empty(one) else one for one in messages]

    def _renders(
        self, tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> bool:
        try:
            render_text(tokenizer, messages, tools or None, self.variables)
        except DataError:
            return False
        return True


def encode_shown(
    tokenizer: Any,
    shown: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] = NOTHING,
) -> list[int]:
    if tools is None and not variables:
        return encode_prompt(tokenizer, shown)
    return render(tokenizer, shown, True, tools, variables)


def _is_empty(message: Message) -> bool:
    others = message.get("tool_calls") or message.get("reasoning_content")
    return message["role"] == "assistant" and not message.get("content") and not others


UNCONSTRAINED = Constraint()


def constraint_of(
    response_format: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    form: CallForm = HERMES,
) -> Constraint:
    """The constraint of a request with these fields. `form`: of calls. Raises ConfigError, naming
    the field, for what is wrong or cannot be followed."""
    usable_schema = _format_schema(response_format)
    schema, notes = (None, ()) if usable_schema is None else usable_schema
    answer = None if schema is None else Grammar.json_schema(schema)._replace(exact=True)
    without_calls = Constraint(answer, notes=notes)
    if not tools:
        given = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        for name, value in given.items():
            if value is not None and value != "none":
                raise ConfigError(f"{name} {value!r} has no meaning without tools")
        return without_calls
    functions = _functions(tools)
    names = _allowed(tool_choice, list(functions))
    if not names:
        return without_calls
    forced = tool_choice not in (None, "auto")
    at_most_one = parallel_tool_calls is False or isinstance(tool_choice, Mapping)
    called = {name: functions[name] for name in names}
    notes = (*notes, *(note for parameters in called.values() for note in parameters.notes))
    schemas = {name: parameters.schema for name, parameters in called.items()}
    if form.arguments is None:
        grammar = calls_grammar(schemas, schema, forced, at_most_one, form)
        return Constraint(grammar, list(tools), notes)
    entries = entries_of(tools, schemas, form.arguments)
    grammar = calls_grammar(entries, schema, forced, at_most_one, form)
    notes = (*notes, *(note for one in entries.values() for note in one.notes))
    return Constraint(
        grammar, list(tools), notes, values={n: one.values for n, one in entries.items()}
    )


def _format_schema(response_format: Mapping[str, Any] | None) -> Usable | None:
    """The schema that the answer's text has to fit; None: any text."""
    if response_format is None:
        return None
    field = "response_format"
    _check_object(field, response_format, {"type", "json_schema"})
    kind = response_format.get("type")
    if kind not in FORMATS:
        raise unknown_value(f"{field}.type", kind, FORMATS)
    if kind != "json_schema":
        if response_format.get("json_schema") is not None:
            raise ConfigError(f"{field}.json_schema has no meaning with type {kind!r}")
        return Usable(_with(JSON_OBJECT, INDENTED)) if kind == "json_object" else None
    field += ".json_schema"
    given = response_format.get("json_schema")
    _check_object(field, given, {"name", "description", "schema", "strict"})
    assert given is not None
    _check_types(field, given)
    if not isinstance(schema := given.get("schema"), Mapping):
        raise ConfigError(f"{field}.schema {schema!r}: expected a JSON schema, an object")
    followed = usable(f"{field}.schema", schema, strict=given.get("strict") is True)
    return followed._replace(schema=_with(followed.schema, INDENTED))


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Usable]:
    """The schema of each function's arguments, by its name."""
    if len(tools) > MAX_TOOLS:
        raise ConfigError(f"tools has {len(tools)} entries; expected {MAX_TOOLS} at most")
    functions: dict[str, Usable] = {}
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        _check_object(field, tool, {"type", "function"})
        if tool.get("type") != "function":
            raise unknown_value(f"{field}.type", tool.get("type"), ["function"])
        field += ".function"
        function = tool.get("function")
        _check_object(field, function, {"name", "description", "parameters", "strict"})
        assert function is not None
        _check_types(field, function)
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(f"{field}.name {name!r}: expected 1 to 64 letters, digits, _ or -")
        if name in functions:
            raise ConfigError(f"{field}.name {name!r} is that of an earlier tool")
        functions[name] = _arguments(f"{field}.parameters", function)
    return functions


def _arguments(field: str, function: Mapping[str, Any]) -> Usable:
    given = function.get("parameters")
    if given is None:
        given = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        raise ConfigError(f"{field}: expected the JSON schema of an object, with type 'object'")
    strict = function.get("strict") is True
    followed = usable(field, {**given, "type": "object"}, strict)
    return followed._replace(schema=_with(followed.schema, ONE_LINE))


def _with(schema: Mapping[str, Any], space: str) -> dict[str, Any]:
    """The schema with an option of what white space is allowed, unless it has one. oneOf is read as
    anyOf where that has been found to be all that is possible."""
    return {**schema, OPTIONS: {"whitespace_pattern": space, **schema.get(OPTIONS, {})}}


def _check_object(field: str, given: Any, known: set[str]) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{field} {given!r}: expected an object")
    for name in given:
        if name not in known:
            raise unknown_value(f"field of {field}", name, sorted(known))


def _check_types(field: str, given: Mapping[str, Any]) -> None:
    """Check the fields that functions and schemas both may have. Raises ConfigError."""
    if not isinstance(strict := given.get("strict"), bool | None):
        raise ConfigError(f"{field}.strict {strict!r}: expected true or false")
    if not isinstance(description := given.get("description"), str | None):
        raise ConfigError(f"{field}.description {description!r}: expected text")


def _allowed(choice: str | Mapping[str, Any] | None, names: list[str]) -> list[str]:
    """The functions that may be called."""
    if choice is None or isinstance(choice, str):
        if choice not in (None, *CHOICES):
            raise unknown_value("tool_choice", choice, CHOICES)
        return [] if choice == "none" else names
    field = "tool_choice"
    _check_object(field, choice, {"type", "function"})
    if choice.get("type") != "function":
        raise unknown_value(f"{field}.type", choice.get("type"), ["function"])
    _check_object(f"{field}.function", choice.get("function"), {"name"})
    if (name := choice["function"].get("name")) not in names:
        raise unknown_value(f"{field}.function.name", name, names)
    return [name]
