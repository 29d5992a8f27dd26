"""Calls in the form that a chat template writes, found by rendering it: read, and held to it by a
grammar, whatever the arguments say."""

import json
import random
import re
from typing import Any

import pytest
from support.samples import pairs
from support.serving.grammars import accepts
from support.serving.live_server import live_server
from support.serving.scripted import placed_base
from support.serving.served_calls import QUESTION, check_served, tokens_of
from support.serving.tagged import tagged_tokenizer
from support.small_engines import build_engine
from support.text.calling_templates import ASK, FORMS, LLAMA, MISTRAL, OTHERS, SHOWN
from support.text.thinking_templates import HARMONY

from medusa_kit.data.template import render_text
from medusa_kit.serve.calls.call_form import HERMES as HERMES_FORM
from medusa_kit.serve.calls.reading import AnswerReader, Reading
from medusa_kit.serve.calls.reasoning import Reasoning
from medusa_kit.serve.calls.template_calls import form_of
from medusa_kit.serve.calls.tool_calls import ReadAnswer, read_answer
from medusa_kit.serve.calls.tools import constraint_of

TOOLS = [
    {"type": "function", "function": {"name": n, "parameters": {}}} for n in ("f", "ff", "g-1")
]
THINK = Reasoning("<think>", "</think>")


def of_template(template: str) -> Any:
    return tagged_tokenizer(template=template)


def asked(*calls: tuple[str, Any], content: Any = None) -> dict[str, Any]:
    """The assistant's message, as clients send it back."""
    return {"role": "assistant", "content": content, "tool_calls": [
        {"id": f"call_{number:024}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(calls)]}  # fmt: skip


def rendered(known: Any, *messages: dict[str, Any]) -> str:
    """What the template writes of messages of a conversation behind the question."""
    shown, tools = constraint_of(tools=TOOLS, form=form_of(known)).shown(
        known, [QUESTION, *messages]
    )
    return render_text(known, shown, tools, ask=False).rpartition("ab?<|im_end|>\n")[2]


def written(known: Any, *calls: tuple[str, Any]) -> str:
    """What a model writes that calls so."""
    text = rendered(known, asked(*calls)).removeprefix("<|im_start|>assistant\n")
    for end in ("<|im_end|>\n", "<|eom_id|>", "<|calls|>"):
        text = text.removesuffix(end)
    return text


def read(known: Any, text: str, step: int, reasoning: Reasoning | None = None) -> ReadAnswer:
    reader = AnswerReader(Reading(True, reasoning, form_of(known)))
    parts = [text[at : at + step] for at in range(0, len(text), step)]
    pieces = [piece for part in parts for piece in reader.push(part)]

    class Given:
        push, finish_reason = staticmethod(lambda _: pieces), reader.finish_reason
        finish = reader.finish

    return read_answer("", "stop", Given())


def called(answer: ReadAnswer) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in answer.tool_calls]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def any_value(draw: random.Random, tags: list[str], depth: int = 0) -> Any:
    def text() -> str:
        return "".join(draw.choice(tags) for _ in range(draw.randint(0, 3)))

    match draw.randint(0, 6 if depth < 3 else 4):
        case 5:
            return [any_value(draw, tags, depth + 1) for _ in range(draw.randint(0, 3))]
        case 6:
            return {text(): any_value(draw, tags, depth + 1) for _ in range(draw.randint(0, 3))}
        case 4:
            return draw.choice([0, -5, 3.25, 10**12, True, False, None])
    return text()


def some_calls(name: str, seed: int) -> list[tuple[str, Any]]:
    family, draw = FORMS[name], random.Random(seed)
    tags = [
        *family.marks,
        family.writes,
        family.further or "}",
        '"',
        "\\",
        '{"a": [}',
        "}]\n",
        "é☃",
        "a b",
    ]
    number = 1 if family.further is None else draw.randint(1, 3)
    return [
        (
            draw.choice(["f", "ff", "g-1"]),
            {f"k{i}": any_value(draw, tags) for i in range(draw.randint(0, 3))},
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_that_of_the_template(name: str) -> None:
    family, known = FORMS[name], of_template(FORMS[name].template)
    form = form_of(known)
    assert form.taken is not None
    assert (form.between is None) == (family.further is None)
    assert form.first == (name == "llama")
    twice = [("f", {}), ("ff", {"x": 1})] if family.further else [("f", {})]
    text = written(known, *twice)
    assert text.startswith(family.writes)
    assert family.further is None or family.further in text
    told = form.written([(function, json.dumps(arguments)) for function, arguments in twice])
    assert called(read(known, told, 1)) == twice


@pytest.mark.parametrize(("name", "step"), pairs(list(FORMS), [1, 3, 1000]))
def test_calls_come_back_as_they_were_written(name: str, step: int) -> None:
    known = of_template(FORMS[name].template)
    for seed in range(20):
        calls = some_calls(name, seed)
        text = written(known, *calls)
        for content in ("", "Let me {see}."):
            if content and form_of(known).first:
                continue
            told = read(known, f"<think>{text}\n</think>{content}\n\n{text}", step, THINK)
            assert called(told) == calls
            assert (told.content or "", told.reasoning) == (content, text.rstrip())
            assert told.finish_reason == "tool_calls"
            told = read(known, f"{content}{text}", step)
            assert (called(told), told.content or "") == (calls, content)


def test_text_without_calls_is_content() -> None:
    for name, family in FORMS.items():
        known = of_template(family.template)
        for text in ("Hi <b> [x] {", "{", '{"name": 5}', '{"a": "f"}', "So: " + LLAMA, "{{}}"):
            for step in (1, 1000):
                if form_of(known).tag not in text or form_of(known).first:
                    told = read(known, text, step)
                    assert (told.content, told.tool_calls) == (text, []), name


@pytest.mark.parametrize("name", FORMS)
def test_the_grammar_has_the_form(name: str) -> None:
    known = of_template(FORMS[name].template)
    form = form_of(known)
    one, two = written(known, ("f", {"a": [1, "b"]})), ""
    if form.between is not None:
        two = written(known, ("f", {"a": [1, "b"]}), ("ff", {}))
    for choice in ({}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}},
                   {"tool_choice": {"type": "function", "function": {"name": "f"}}},
                   {"parallel_tool_calls": False}):  # fmt: skip
        grammar = constraint_of(tools=TOOLS, form=form, **choice).grammar
        assert grammar is not None
        assert accepts(grammar, one), choice
        several = "function" not in str(choice.get("tool_choice", "")) and len(choice) < 2
        several = several and "parallel_tool_calls" not in choice
        assert not two or accepts(grammar, two) == several, choice
        if choice and "parallel_tool_calls" not in choice and "response_format" not in choice:
            assert not accepts(grammar, "So.")
            assert not accepts(grammar, one.replace('"b"', '"b'))
            assert not accepts(grammar, one.replace("[1", "[1,,"))
    strict = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"enum": [True]}}, "required": ["a"],
        "additionalProperties": False}}}]  # fmt: skip
    grammar = constraint_of(tools=strict, tool_choice="required", form=form).grammar
    assert grammar is not None
    assert accepts(grammar, written(known, ("f", {"a": True})))
    assert not accepts(grammar, one)


@pytest.mark.parametrize("name", OTHERS)
def test_other_templates_keep_hermes_form(name: str) -> None:
    known = of_template(OTHERS[name])
    assert form_of(known) == HERMES_FORM
    if name != "refuses":
        told = constraint_of(tools=TOOLS).shown(known, [QUESTION, asked(("f", {}))])
        assert told[1] is None
        assert "You may call functions" in told[0][0]["content"]
        assert "<tool_call>" in told[0][-1]["content"]


def test_a_template_that_shows_no_tools_is_told_of_them_in_its_own_form() -> None:
    known = of_template(FORMS["deepseek"].template)
    text = rendered(known)
    messages, tools = constraint_of(tools=TOOLS).shown(known, [QUESTION])
    assert (text, tools) == ("", None)
    example = 'function<｜tool▁sep｜>the function\n```json\n{"argument": "value"}\n```'
    assert example in messages[0]["content"]


def test_results_go_back_with_ids_that_the_template_takes() -> None:
    called = asked(("f", {}))
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "Rain"}
    known = of_template(MISTRAL)
    shown, tools = constraint_of(tools=TOOLS).shown(known, [QUESTION, called, result])
    assert tools
    (call,) = shown[1]["tool_calls"]
    assert call["id"] == shown[2]["tool_call_id"]
    assert len(call["id"]) == 9
    again, _ = constraint_of(tools=TOOLS).shown(known, shown)
    assert again == shown
    assert len(read(known, written(known, ("f", {})), 1).tool_calls[0]["id"]) == 9


def test_what_a_template_refuses_is_given_as_text() -> None:
    known = of_template(LLAMA)
    cut = asked(("f", {}))
    cut["tool_calls"][0]["function"]["arguments"] = '{"a": '
    assert '{"name": "f", "parameters": {"a": }' in rendered(known, cut)


ONE_CALL = (  # of a message, as GigaChat's shows; results say whose they are, as gpt-oss' do
    SHOWN + "{% set last = namespace(name='') %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{{ last.name }}: {% endif %}{{ m.content }}{% if m.tool_calls %}"
    "{% set f = m.tool_calls[0].function %}{% set last.name = f.name %}<|call|>{{ f.name }}"
    "{{ f.arguments | tojson }}{% endif %}<|im_end|>\n{% endfor %}" + ASK
)  # fmt: skip


@pytest.mark.parametrize("template", [ONE_CALL, LLAMA, HARMONY], ids=["one", "llama", "harmony"])
def test_several_calls_go_back_where_a_message_has_one(template: str) -> None:
    """Such templates pass over further calls, and give their results to the first."""
    known = of_template(template)
    calls = asked(("f", {"a": 1}), ("ff", {"a": 2}), ("g-1", {"a": 3}), content="So.")
    ids = [call["id"] for call in calls["tool_calls"]]
    results = [{"role": "tool", "tool_call_id": ids[n], "content": f"Zu{n}"} for n in (2, 0, 1)]
    end = {"role": "assistant", "content": "Done."}
    shown, _ = constraint_of(tools=TOOLS, form=form_of(known)).shown(
        known, [QUESTION, calls, *results, end, QUESTION]
    )
    text = render_text(known, shown, None, ask=False)
    places = [text.find(part) for part in ("f", '"a": 1', "Zu0", '"a": 2', "Zu1", '"a": 3', "Zu2")]
    assert -1 not in places
    assert places == sorted(places)
    if template == ONE_CALL:
        assert [f"{name}: Zu{n}" in text for n, name in enumerate(("f", "ff", "g-1"))] == [True] * 3
    assert text.count("So.") in ((0, 1) if template == HARMONY else (1,))
    assert text.count("Done.") == 1
    again, _ = constraint_of(tools=TOOLS, form=form_of(known)).shown(known, shown)
    assert again == shown


def test_results_of_calls_with_one_id_go_back_in_their_order() -> None:
    """Some clients give all calls of a message one id, or none of their own."""
    known = of_template(ONE_CALL)
    calls = asked(("f", {}), ("ff", {}), ("g-1", {}))
    for call in calls["tool_calls"][:2]:
        call["id"] = "same"
    numbers = ["same", calls["tool_calls"][2]["id"], "same", "same", "unknown"]
    results = [{"role": "tool", "tool_call_id": one, "content": f"Zu{n}"}
               for n, one in enumerate(numbers)]  # fmt: skip
    shown, _ = constraint_of(tools=TOOLS, form=form_of(known)).shown(known, [calls, *results])
    text = render_text(known, shown, None, ask=False)
    assert re.findall(r"[\w-]+: Zu\d", text) == ["f: Zu0", "ff: Zu2", "ff: Zu3", "g-1: Zu1",
                                                 "g-1: Zu4"]  # fmt: skip


def test_an_empty_answer_goes_back_to_a_template_that_refuses_it() -> None:
    """As a stop string leaves one that comes first."""
    refuses = (
        "{% if m.role == 'assistant' and not m.content %}{{ raise_exception('no') }}{% endif %}"
    )
    for template in (ONE_CALL, OTHERS["none"]):
        for refused in (False, True):
            known = of_template(template.replace(
                "messages %}", "messages %}" + refuses * refused, 1))  # fmt: skip
            empty = {"role": "assistant", "content": ""}
            shown, _ = constraint_of().shown(known, [QUESTION, empty, QUESTION])
            assert shown[1]["content"] == " " * refused
            render_text(known, shown, None)


SCHEMA = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
          "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}  # fmt: skip
SERVED = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in ("f", "ff")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "special"), [(name, True) for name in FORMS] + [("mistral small", False)]
)
def test_served(name: str, special: bool) -> None:
    """Of the model's own accord and as asked for; calls and results go back."""
    family, known = FORMS[name], of_template(FORMS[name].template)
    calls = [("ff", {"x": True}), ("f", {"x": False})][: 2 if family.further else 1]
    marks = family.marks if special else ()
    shown, tools = constraint_of(tools=SERVED).shown(known, [QUESTION])
    text = written(known, *calls)
    check_served(text, calls, family.template, marks, SERVED, shown, tools)


@pytest.mark.slow
def test_what_the_grammar_does_not_allow_is_replaced() -> None:
    family = FORMS["mistral small"]
    text = "[TOOL_CALLS]no[CALL_ID]123456789[ARGS]{}"
    script = tokens_of(text, family.marks)
    base = placed_base(script, family.template, family.marks, [QUESTION], tools=SERVED)
    with live_server(build_engine(base)) as live, live.http() as http:
        body = {"model": live.model, "temperature": 0, "max_tokens": 200, "tools": SERVED,
                "messages": [QUESTION], "parallel_tool_calls": False}  # fmt: skip
        (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] in ("f", "ff")
        assert list(json.loads(call["function"]["arguments"])) == ["x"]
