"""response_format and tools: the grammar they make, how they are rendered, how calls are read."""

import json
from typing import Any

import pytest
from support.serving.grammars import accepts, tokenizer, writing_base
from support.small_engines import build_engine

from medusa_kit.engine.recent_turns import RecentTurns
from medusa_kit.errors import ConfigError
from medusa_kit.serve.calls.tool_calls import CallReader, read_answer
from medusa_kit.serve.calls.tool_messages import as_text, for_template
from medusa_kit.serve.calls.tools import Constraint, constraint_of
from medusa_kit.serve.conversations import Conversations

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer"}},
            "required": ["place"],
            "additionalProperties": False,
            "$defs": {"place": {"type": "string", "enum": ["Oslo", "Rome"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "now"}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


OSLO, TIME = call("get_weather", '{"place":"Oslo"}'), call("now", "{}")
TEXTS = {
    "text": "It is late.\n<b>",
    "json": '{"a": [1]}',
    "one": OSLO,
    "other": TIME,
    "text, one": f"Let me see.\n{OSLO}",
    "both": f"{OSLO}\n{TIME}",
    "indented": '{\n    "a": [\n        1\n    ]\n}',
    "space for ever": '{"a": ' + 40 * " " + "1}",
    "no such place": call("get_weather", '{"place":"Paris"}'),
    "no place": call("get_weather", '{"days":1}'),
    "no such function": call("later", "{}"),
    "no arguments": '<tool_call>\n{"name": "now"}\n</tool_call>',
    "arguments of another": call("now", '{"place":"Oslo"}'),
    "unended": OSLO.removesuffix("</tool_call>"),
    "text after": f"{OSLO}\nThere.",
}
ANY = {"text", "json", "indented", "space for ever", "one", "other", "text, one", "both"}


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({}, ANY),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ANY),
        ({"parallel_tool_calls": False}, ANY - {"both"}),
        ({"tool_choice": "required"}, {"one", "other", "both"}),
        ({"tool_choice": NAMED}, {"other"}),
        (
            {"response_format": {"type": "json_object"}},
            {"json", "indented", "one", "other", "both"},
        ),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, {"json", "indented"}),
        ({"response_format": {"type": "text"}}, ANY),
    ],
)
def test_what_an_answer_may_be(fields: dict[str, Any], allowed: set[str]) -> None:
    grammar = constraint_of(tools=TOOLS, **fields).grammar
    assert grammar is not None
    assert {name for name, text in TEXTS.items() if accepts(grammar, text)} == allowed


def test_without_tools() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": []},
                   {"tool_choice": "none"}):  # fmt: skip
        assert constraint_of(**fields) == Constraint()
    none = constraint_of(tools=TOOLS, tool_choice="none")
    assert (none.grammar, none.calls) == (None, False)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}}
    grammar = constraint_of(form).grammar
    assert grammar is not None
    assert accepts(grammar, '{"n": 3}')
    assert not accepts(grammar, '{"n": "3"}')


def test_keywords_that_cannot_be_enforced() -> None:
    """Refused where a schema is meant strictly."""
    schema = {"type": "array", "uniqueItems": True}
    asked = {"name": "s", "schema": schema}
    with pytest.raises(ConfigError, match=r"response_format\.json_schema\.schema: .*uniqueItems"):
        constraint_of({"type": "json_schema", "json_schema": {**asked, "strict": True}})
    for form in ({**asked, "strict": False}, asked):  # as OpenAI has it, strictness is asked for
        followed = constraint_of({"type": "json_schema", "json_schema": form})
        assert accepts(followed.grammar, "[1, 1]")
    function = {"name": "f", "parameters": {"properties": {"a": schema}}}
    assert constraint_of(tools=[{"type": "function", "function": function}]).calls
    function["strict"] = True
    with pytest.raises(ConfigError, match=r"parameters\.properties\.a: .*uniqueItems"):
        constraint_of(tools=[{"type": "function", "function": function}])


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": "json"}, "response_format 'json': expected an object"),
        ({"response_format": {"type": "jsn"}}, "response_format.type 'jsn' is unknown"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema"}}, "json_schema None: expected an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "schema None"),
        ({"response_format": {"type": "text", "typ": 1}}, "field of response_format 'typ'"),
        ({"tool_choice": "required"}, "tool_choice 'required' has no meaning without tools"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls True has no meaning without tools"),
        ({"tools": ["f"]}, r"tools\[0\] 'f': expected an object"),
        ({"tools": [{"type": "web"}]}, r"tools\[0\].type 'web' is unknown"),
        ({"tools": tool(name="a b")}, r"tools\[0\].function.name 'a b'"),
        ({"tools": [*tool(), *tool()]}, r"tools\[1\].function.name 'f' is that of an earlier"),
        ({"tools": tool(parameters={"type": "array"})}, r"tools\[0\].function.parameters"),
        ({"tools": tool(parameters={"properties": {"a": {"type": "x"}}})}, "Invalid type: x"),
        ({"tools": tool() * 129}, "tools has 129 entries"),
        ({"tools": tool(), "tool_choice": "always"}, "tool_choice 'always' is unknown"),
        ({"tools": tool(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice.function.name 'g' is unknown"),
        ({"tools": tool(), "tool_choice": {"type": "function"}}, "tool_choice.function None"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        constraint_of(**fields)


# Answers.


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain < text <tool", "plain < text <tool", []),
        (" \n", " \n", []),
        (f"Let me see. \n\n{OSLO}", "Let me see.", [("get_weather", '{"place":"Oslo"}')]),
        (f"{OSLO}\n{TIME}", None, [("get_weather", '{"place":"Oslo"}'), ("now", "{}")]),
        (call("f", r'{"a": "}\"{", "b": {"c": "</tool_call>"}}'), None,
         [("f", r'{"a": "}\"{", "b": {"c": "</tool_call>"}}')]),
    ],
)  # fmt: skip
def test_calls_are_read_however_the_text_comes(
    text: str, content: str | None, calls: list[tuple[str, str]], step: int
) -> None:
    reader, pieces = CallReader(), []
    for start in range(0, len(text), step):
        pieces += reader.push(text[start : start + step])
    pieces += reader.finish()
    assert ("".join(piece.content for piece in pieces) or None) == content
    names = [piece.name for piece in pieces if piece.id is not None]
    arguments = [
        "".join(piece.arguments for piece in pieces if piece.index == index)
        for index in range(len(names))
    ]
    assert list(zip(names, arguments, strict=True)) == calls
    assert reader.finish_reason("stop") == ("tool_calls" if calls else "stop")
    whole = read_answer(text, "stop")
    assert whole.content == content
    functions = [one["function"] for one in whole.tool_calls]
    assert [(one["name"], one["arguments"]) for one in functions] == calls


def test_pieces_come_as_soon_as_they_can() -> None:
    reader = CallReader()
    assert [piece.as_delta() for piece in reader.push("Hi <")] == [{"content": "Hi"}]
    assert reader.push("tool_call>\n") == []
    (head,) = reader.push('{"name":"now","arguments":{')
    delta = head.as_delta()["tool_calls"][0]
    assert delta.pop("id").startswith("call_")
    assert delta == {"index": 0, "type": "function", "function": {"name": "now", "arguments": "{"}}
    (more,) = reader.push('"a')
    assert more.as_delta() == {"tool_calls": [{"index": 0, "function": {"arguments": '"a'}}]}


def test_a_call_that_is_cut() -> None:
    cut = read_answer(OSLO[:52], "length")
    assert cut.finish_reason == "length"
    assert cut.tool_calls[0]["function"] == {"name": "get_weather", "arguments": OSLO[49:52]}
    assert read_answer(OSLO[:30], "length").tool_calls == []
    assert read_answer(f"{OSLO}\n{TIME}"[:-20], "length").finish_reason == "length"


# Prompts.

QUESTION = {"role": "user", "content": "What is the weather in Oslo?"}
ASKED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "get_weather", "arguments": '{"place":"Oslo"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ],
}  # fmt: skip
RESULTS = [
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": "Noon"},
]
CHATTING = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "({{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}){% endfor %}"
)


def rendered(template: str | None, constraint: Constraint, messages: list[dict[str, Any]]) -> str:
    from copy import copy

    own = copy(tokenizer())
    if template is not None:
        own.chat_template = template
    ids = constraint.encode(own, messages)
    chats = Conversations(own, RecentTurns())
    assert chats.prompt(messages, constraint, "", 8192).prompt.ids == ids
    return own.decode(ids)


def test_a_template_that_knows_calls_is_given_the_tools() -> None:
    text = rendered(CHATTING, constraint_of(tools=TOOLS), [QUESTION, ASKED, *RESULTS])
    assert text == (
        "[get_weather][now](user What is the weather in Oslo?)(assistant "
        '<tool_call>{"name": "get_weather", "arguments": {"place": "Oslo"}}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>)(tool Rain)(tool Noon)'
    )


def test_others_are_told_by_a_system_message_and_see_calls_as_text() -> None:
    system = {"role": "system", "content": "Be brief."}
    text = rendered(None, constraint_of(tools=TOOLS), [system, QUESTION, ASKED, *RESULTS])
    assert text.count("<|im_start|>system\nBe brief.\n\nYou may call functions") == 1
    assert json.dumps(NOW) in text
    assert '{"name": "the function", "arguments": {"argument": "value"}}' in text
    told = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{told}\n<tool_call>" in text
    assert (
        "<|im_start|>user\n<tool_response>\nRain\n</tool_response>\n"
        "<tool_response>\nNoon\n</tool_response><|im_end|>" in text
    )
    assert "You may call" not in rendered(None, Constraint(), [QUESTION, ASKED, *RESULTS])


def test_a_template_without_system_messages_is_told_by_the_user() -> None:
    from support.debug_model import NO_SYSTEM

    text = rendered(NO_SYSTEM, constraint_of(tools=TOOLS), [QUESTION])
    assert f"<|im_start|>user\n{QUESTION['content']}\n\nYou may call functions" in text


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("", "{}"), (" ", "{}"), ("null", "{}"), (None, "{}"), ({}, "{}"),
        ('{"a":1}', '{"a": 1}'), ({"a": "é"}, '{"a": "é"}'),
        ("{", "{"), ('{"a": "Os', '{"a": "Os'), ("[1]", "[1]"), ([1], "[1]"), ("5", "5"),
        ('"x"', '"x"'), ("Oslo", "Oslo"), ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("[" * 100_000, "[" * 100_000), ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["f", None])
def test_calls_of_a_conversation_are_taken_as_they_are(
    arguments: Any, written: str, name: str | None
) -> None:
    called = {"name": name, "arguments": arguments}
    asked = {"role": "assistant", "content": "So", "tool_calls": [{"id": "a", "function": called}]}
    (given,) = as_text([asked])
    told = f'{{"name": "{name or ""}", "arguments": {written}}}'
    assert given["content"] == f"So\n<tool_call>\n{told}\n</tool_call>"
    (given,) = for_template([asked])
    if not written.endswith("}") or "ud800" in written or "9" * 5000 in written:
        assert given == as_text([asked])[0]
    else:
        assert given["tool_calls"][0]["function"]["arguments"] == json.loads(written)


def test_a_cut_call_is_shown_by_a_template_that_knows_calls() -> None:
    cut = {"id": "a", "function": {"name": "get_weather", "arguments": '{"place": "Os'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [*ASKED["tool_calls"], cut]}
    text = rendered(CHATTING, constraint_of(tools=TOOLS), [QUESTION, asked])
    assert '{"name": "get_weather", "arguments": {"place": "Oslo"}}</tool_call>' in text
    assert '{"name": "get_weather", "arguments": {"place": "Os}</tool_call>' in text


def test_tools_need_a_template() -> None:
    with pytest.raises(ConfigError, match="tools need a chat template"):
        rendered("", constraint_of(tools=TOOLS), [QUESTION])


def test_a_model_that_has_to_call_calls() -> None:
    """Random weights, which would never have come to it."""
    engine = build_engine(writing_base())
    asked = constraint_of(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    prompt = tokenizer()("weather", add_special_tokens=False).input_ids
    result = engine.generate(
        prompt, max_new_tokens=200, drafter="suffix", temperature=1.0, grammar=asked.grammar
    )
    read = read_answer(result.text, result.finish_reason)
    assert (read.finish_reason, read.content) == ("tool_calls", None)
    (called,) = read.tool_calls
    assert called["function"]["name"] in ("get_weather", "now")
    json.loads(called["function"]["arguments"])
