"""Thoughts of model families, each told from its answer by the form that its template renders."""

import json
import re
from typing import Any

import pytest
from support.serving.live_server import live_server
from support.serving.scripted import placed_base
from support.serving.tagged import tagged_tokenizer
from support.small_engines import build_engine
from support.text.thinking_templates import FAMILIES, HARMONY, HARMONY_TOKENS

from medusa_kit.base.tokenizer.thoughts import thoughts_of
from medusa_kit.data.template import render_text
from medusa_kit.serve.calls.reading import Reading, reader_of
from medusa_kit.serve.calls.reasoning import reasoning_of
from medusa_kit.serve.calls.tool_calls import Piece, ReadAnswer, read_answer

QUESTION = {"role": "user", "content": "ab?"}
STEPS = (1, 3, 1000)


def tokenizer_of(name: str) -> Any:
    family = FAMILIES[name]
    return tagged_tokenizer(special=family.added, template=family.template)


def read(tokenizer: Any, text: str, step: int, calls: bool = False, **variables: Any) -> ReadAnswer:
    prompt = render_text(tokenizer, [QUESTION], variables=variables)
    reader = reader_of(Reading(calls, reasoning_of(tokenizer, prompt)))

    class InSteps:
        finish, finish_reason = reader.finish, reader.finish_reason

        def push(self, text: str) -> list[Piece]:
            parts = (text[at : at + step] for at in range(0, len(text), step))
            return [piece for part in parts for piece in reader.push(part)]

    return read_answer(text, "stop", InSteps())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_and_answer_are_apart(name: str, step: int) -> None:
    answer = read(tokenizer_of(name), FAMILIES[name].writes, step)
    assert answer.reasoning == "Let me see."
    assert answer.content == "It is."


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_answer_says_no_mark_aloud(name: str) -> None:
    """Wherever it is cut, nothing but the beginning of thoughts and answer is shown."""
    tokenizer, writes = tokenizer_of(name), FAMILIES[name].writes
    for length in range(writes.index("Let me see."), len(writes)):
        answer = read(tokenizer, writes[:length], 1000)
        if length < writes.index("It is."):
            assert not answer.content, writes[:length]
        else:
            assert "It is.".startswith(answer.content or "") or name == "apriel 1.5"


@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_go_back_where_the_template_takes_them(name: str) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    found = thoughts_of(tokenizer)
    # transformers gives gpt-oss its thoughts by itself, from some version on.
    ways = (family.way, "reasoning_content" if family.way == "thinking" else family.way)
    assert (found.way if found else None) in ways
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    given = {"role": "assistant", "content": "", "reasoning_content": "Zulu", "tool_calls": [call]}
    plain = {"role": "assistant", "content": "So.", "reasoning_content": "Zulu"}
    shown = [render_text(tokenizer, [QUESTION, one], ask=False) for one in (given, plain)]
    assert any("Zulu" in text for text in shown) == (family.way is not None)
    assert "So." in shown[1]


def test_thoughts_that_a_template_refuses_there_are_left_out() -> None:
    tokenizer = tagged_tokenizer(special=HARMONY_TOKENS, template=HARMONY)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    both = {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "Zulu",
        "tool_calls": [call],
    }
    assert "functions.f" in render_text(tokenizer, [QUESTION, both], ask=False)


@pytest.mark.parametrize("step", STEPS)
def test_an_answer_without_thoughts(step: int) -> None:
    for name, text in (
        ("minimax_m3", "</mm:think>It is."),
        ("gpt_oss", "<|channel|>final<|message|>It is."),
        ("gpt_oss", "It is."),
        ("cohere2", "<|END_THINKING|><|START_TEXT|>It is."),
        ("solar", "<|content|>It is."),
        ("gemma4_text", "It is."),
        ("apertus", "It is."),
    ):
        answer = read(tokenizer_of(name), text, step)
        assert (answer.reasoning, answer.content) == ("", "It is."), name
    for name in ("gemma4_text", "kimi_k3"):
        closed = read(tokenizer_of(name), "It is.", step, enable_thinking=False)
        assert (closed.reasoning, closed.content) == ("", "It is.")


HEADS = (
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.f<|message|>",
)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("head", HEADS)
def test_messages_to_functions_are_calls(head: str, step: int) -> None:
    tokenizer = tokenizer_of("gpt_oss")
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
    answer = read(tokenizer, before + said + head + '{"x": [1]}', step, calls=True)
    assert (answer.reasoning, answer.content, answer.finish_reason) == (
        "Hm.",
        "Wait.",
        "tool_calls",
    )
    (call,) = answer.tool_calls
    assert call["function"] == {"name": "f", "arguments": '{"x": [1]}'}
    cut = read(tokenizer, before + head + '{"x": [', step, calls=True)
    assert (cut.finish_reason, cut.tool_calls[0]["function"]["arguments"]) == ("stop", '{"x": [')
    unasked = read(tokenizer, before + head + '{"x": [1]}', step)
    assert (unasked.reasoning, unasked.content) == ('Hm.\n{"x": [1]}', None)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "text", ["<b>Hi</b>", "So.<|channel|>final<|message|>It is.", "<|mess", "x" * 300]
)
def test_an_answer_without_a_head_is_said_as_it_comes(text: str, step: int) -> None:
    answer = read(tokenizer_of("gpt_oss"), text, step)
    assert (answer.reasoning, answer.content or "") == ("", "" if text == "<|mess" else text)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}",
        "{{ raise_exception('never') }}",
    ],
)
def test_templates_without_a_form(template: str) -> None:
    assert thoughts_of(tagged_tokenizer(template=template)) is None


def tokens_of(text: str) -> list[str]:
    return [part for part in re.split(r"(<[^<>]*>|\[[^\[\]]*\]|\n+)", text) if part]


SCHEMA = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
          "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in ("f", "ff")]
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
HM = "<|channel|>analysis<|message|>Hm to=functions.f<|end|><|start|>assistant"
CALLED = "<|channel|>commentary to=functions.ff <|constrain|>json<|message|>"
TO_FF = " to=functions.ff<|channel|>commentary json<|message|>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writes", "asked"),
    [
        (HM + CALLED + '{"x":true}', {}),
        (HM + TO_FF + '{"x":true}', {}),
        (TO_FF + '{"x":true}', {}),
        (HM + CALLED + '{"x":true}', {"tool_choice": "required"}),
        (HM + TO_FF + '{"x":true}', {"tool_choice": "required"}),
        (HM + CALLED + '{"x":true}', {"response_format": FORMAT}),
        # What the grammar does not allow is replaced.
        (HM + CALLED + '{"y":true}', {}),
        (HM + "<|channel|>final<|message|>So.", {"tool_choice": "required"}),
        (HM + CALLED, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
def test_calls_in_channels_are_served(writes: str, asked: dict[str, Any]) -> None:
    special = [*HARMONY_TOKENS, "<|constrain|>"]
    stops = ["<|call|>", "<|return|>"]
    base = placed_base(tokens_of(writes), HARMONY, special, [QUESTION], stops, tools=TOOLS)
    with live_server(build_engine(base)) as live, live.http() as http:
        body = {"model": live.model, "temperature": 0, "max_tokens": 150, "tools": TOOLS, **asked}
        answer = http.post("/v1/chat/completions", json={**body, "messages": [QUESTION]})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        assert list(json.loads(call["function"]["arguments"])) == ["x"]
        assert call["function"]["name"] in ("f", "ff")
        assert choice["message"]["content"] is None
        # The call and its result go back as the template writes them.
        said = {
            k: v for k, v in choice["message"].items() if k in ("role", "content", "tool_calls")
        }
        result = {"role": "tool", "tool_call_id": call["id"], "content": "Rain"}
        again = {**body, "messages": [QUESTION, said, result], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=again).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "gemma4_text", "apertus", "minimax_m3", "cohere2"])
def test_served(name: str) -> None:
    """Whole and streamed, and the thoughts given back with the next question."""
    family = FAMILIES[name]
    script = [part.replace("\n", "Ċ") for part in tokens_of(family.writes)]
    stops = [family.added[-1]] if name == "gpt_oss" else ["<|im_end|>"]
    base = placed_base(script, family.template, family.added, [QUESTION], stops)
    with live_server(build_engine(base)) as live, live.client() as client:
        asked: dict[str, Any] = {"model": live.model, "messages": [QUESTION], "temperature": 0,
                                 "max_tokens": 60}  # fmt: skip
        (choice,) = client.chat.completions.create(**asked).choices
        told = choice.message.model_dump()
        assert (told["reasoning_content"], told["content"]) == ("Let me see.", "It is.")
        assert choice.finish_reason == "stop"
        deltas = [
            one.choices[0].delta for one in client.chat.completions.create(stream=True, **asked)
        ]
        assert "".join(one.content or "" for one in deltas) == "It is."
        assert "".join(getattr(one, "reasoning_content", "") for one in deltas) == "Let me see."
        for stop, said in (("see", "It is."), ("final", "It is."), ("is", "It ")):
            (choice,) = client.chat.completions.create(stop=stop, **asked).choices
            assert choice.message.content == said
            stopped = client.chat.completions.create(stop=stop, stream=True, **asked)
            assert "".join(one.choices[0].delta.content or "" for one in stopped) == said
        given = {k: told[k] for k in ("role", "content", "reasoning_content")}
        again = {**asked, "messages": [QUESTION, given, QUESTION], "max_tokens": 1}
        used = client.chat.completions.create(**again).usage
        tokenizer = live.service.engine.base.tokenizer
        assert used is not None
        assert used.prompt_tokens == len(
            tokenizer(render_text(tokenizer, again["messages"])).input_ids
        )
