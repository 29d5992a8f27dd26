"""What a model says to itself: apart from its answer, streamed or not, with calls and schemas
behind it, however its tags are tokens."""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import OpenAI
from support.serving.live_server import live_server
from support.serving.scripted import scripted_base
from support.small_engines import build_engine

from medusa_kit.serve.calls.reading import AnswerReader, Reading
from medusa_kit.serve.calls.reasoning import Reasoning

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
# Qwen 3's kind: the model opens the tag, unless the template has closed it; R1's: the template.
OPENS = (
    HEAD + THOUGHT + "{{ m.content }}" + END + "{% if enable_thinking is defined and not "
    "enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENED = HEAD + "{{ m.content.split('</think>')[-1] }}" + END + "<think>\n{% endif %}"
SILENT = HEAD + "{{ m.content }}" + END + "{% endif %}"
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SCHEMA = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
          "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
# How the tags are written: as one token, special or not, or as several.
WHOLE = {"<think>": ["<think>"], "</think>": ["</think>"], "<tool_call>": ["<tool_call>"]}
PARTS = {
    "<think>": ["<thi", "nk>"],
    "</think>": ["</thin", "k>"],
    "<tool_call>": ["<tool", "_call>"],
}
KINDS = {"special": (WHOLE, TAGS), "not special": (WHOLE, []), "text": (PARTS, [])}


@contextmanager
def asking(template: str, kind: str, script: Sequence[str]) -> Iterator[OpenAI]:
    how, special = KINDS[kind]
    tokens = [token for part in script for token in how.get(part, [part])]
    engine = build_engine(scripted_base(tokens, template, special))
    with live_server(engine) as live, live.client() as client:
        yield client


def ask(client: OpenAI, stream: bool, **asked: Any) -> dict[str, Any]:
    """The message, with why it ended; of a stream put together."""
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "ab?"}],
             "max_tokens": 120, "temperature": 0, **asked}  # fmt: skip
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        said = {k: v for k, v in choice.message.model_dump().items() if v}
        return {**said, "finish_reason": choice.finish_reason}
    said: dict[str, Any] = {"role": "assistant"}
    for chunk in client.chat.completions.create(stream=True, **asked):
        (choice,) = chunk.choices
        delta = choice.delta.model_dump()
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                said[name] = said.get(name, "") + delta[name]
        for call in delta.get("tool_calls") or ():
            calls = said.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        said["finish_reason"] = choice.finish_reason
    return said


def plain(text: str, **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "finish_reason": "stop",
        **({"content": text} if text else {}),
        **more,
    }


EITHER = (False, True)  # not streamed, and streamed, of one server


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_is_told_apart(kind: str) -> None:
    for template, script in (
        (OPENS, ["<think>", "Let me", " see.\n", "</think>", "\n \n", "It is.", " So."]),
        (OPENED, ["Let me", " see.\n", "</think>", "\n \n", "It is.", " So."]),
    ):
        with asking(template, kind, script) as client:
            for stream in EITHER:
                told = ask(client, stream)
                assert told == plain("It is. So.", reasoning_content="Let me see.")
                most = 2 if kind == "text" and template == OPENED else 3
                cut = ask(client, stream, max_tokens=most)
                said = cut["reasoning_content"]
                assert said == "Let me see."[: len(said)]
                assert cut["finish_reason"] == "length"
                assert "content" not in cut


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_count_in_the_answer_alone(kind: str) -> None:
    written = ["Let me", " see.\n", "</think>", "\n \n", "It is.", " So."]
    for template, script in ((OPENS, ["<think>", *written]), (OPENED, written)):
        with asking(template, kind, script) as client:
            for stream, stop in itertools.product(
                EITHER, ["me", "e.", "\n", "think", "</", " see.\n</think>", "\n \n"]
            ):
                told = ask(client, stream, stop=stop)
                assert told == plain("It is. So.", reasoning_content="Let me see."), stop
            for stream, (stop, said) in itertools.product(
                EITHER, {" So": "It is.", "s": "It i", "It": "", ".": "It is"}.items()
            ):
                told = ask(client, stream, stop=["me", stop])
                assert told == plain(said, reasoning_content="Let me see."), stop
    with asking(OPENS, kind, [" It", "s", " it", "<"]) as client:  # no thoughts
        for stream in EITHER:
            assert ask(client, stream, stop="s i") == plain(" It")
            assert ask(client, stream, stop=" I") == plain("")
            assert ask(client, stream, stop="<") == plain(" Its it")
    with asking(OPENS, kind, ["<", "b"]) as client:  # a mark may have begun
        for stream in EITHER:
            assert ask(client, stream, stop="<") == plain("")


def test_a_model_without_such_tags_says_all_aloud() -> None:
    with asking(SILENT, "text", ["<think>", "Hm", "</think>", "So."]) as client:
        for stream in EITHER:
            assert ask(client, stream) == plain("<think>Hm</think>So.")


def test_an_answer_without_reasoning_is_whole() -> None:
    with asking(OPENS, "not special", [" So", " <think>", " is it"]) as client:
        for stream in EITHER:
            assert ask(client, stream) == plain(" So <think> is it")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [OPENS, OPENED])
def test_a_schema_holds_behind_the_reasoning(template: str, kind: str) -> None:
    begun = ["<think>"] if template == OPENS else []
    with asking(template, kind, [*begun, "Let me", " see", "</think>", '{"x":', "true"]) as client:
        for stream in EITHER:
            told = ask(client, stream, response_format=FORMAT)
            assert told.pop("content") == '{"x":true}'
            assert told == plain("", reasoning_content="Let me see")
            called = ask(client, stream, tools=TOOLS, tool_choice="required",
                         parallel_tool_calls=False)  # fmt: skip
            assert called["finish_reason"] == "tool_calls"
            assert called["reasoning_content"] == "Let me see"
            (call,) = called["tool_calls"]
            assert list(json.loads(call["function"]["arguments"])) == ["x"]
            assert "content" not in called
            either = ask(client, stream, tools=TOOLS, response_format=FORMAT)
            assert either == {**told, "content": '{"x":true}'}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_its_own_accord(kind: str) -> None:
    """Behind reasoning, in which a tag is text; a tag that no call follows is text too."""
    written = ["<think>", "a call: ", "<tool_call>", " hm", "</think>", "Here:"]
    with asking(OPENS, kind, written) as client:
        for stream in EITHER:
            told = ask(client, stream, tools=TOOLS)
            reasoned = "a call: <tool_call> hm"
            assert told == plain("Here:", reasoning_content=reasoned)
    call = ["Here:", "<tool_call>", '\n{"name": "f", "arguments": ', '{"x": true', "}"]
    with asking(OPENS, kind, call) as client:
        for stream in EITHER:
            told = ask(client, stream, tools=TOOLS, parallel_tool_calls=False)
            assert (told["content"], told["finish_reason"]) == ("Here:", "tool_calls")
            called = told["tool_calls"][0]["function"]
            assert json.loads(called["arguments"]) == {"x": True}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sent_back", [False, True])
def test_the_next_turn_goes_on_from_the_right_tokens(kind: str, sent_back: bool) -> None:
    """Whatever is kept of the turn before, the prompt is what the template says."""
    for template in (OPENS, OPENED):
        begun = ["<think>"] if template == OPENS else []
        with asking(template, kind, [*begun, "Let me", "</think>", "It is."]) as client:
            told = ask(client, stream=False)
            answer = {"role": "assistant", "content": told["content"]}
            if sent_back:
                answer["reasoning_content"] = told["reasoning_content"]
            user = {"role": "user", "content": "ab?"}
            again = {"model": "scripted", "messages": [user, answer, user], "max_tokens": 1}
            used = client.chat.completions.create(**again).usage
            how, special = KINDS[kind]
            parts = [*begun, "Let me", "</think>", "It is."]
            script = [token for part in parts for token in how.get(part, [part])]
            tokenizer = scripted_base(script, template, special).tokenizer
            rendered = tokenizer.apply_chat_template(
                again["messages"], add_generation_prompt=True, return_dict=False
            )
            assert used is not None
            text = tokenizer.decode(rendered)
            assert ("Let me" in text) == (sent_back and template == OPENS)
            assert used.prompt_tokens == len(rendered)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"chat_template": ""}}, "chat_template_kwargs.chat_template"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
    ],
)
def test_what_the_template_does_not_take_is_refused(fields: dict[str, Any], param: str) -> None:
    with asking(SILENT, "text", ["So."]) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, False, extra_body=fields)
        assert caught.value.param == param
        assert ask(client, False, extra_body={"reasoning_effort": None})["content"] == "So."


def test_an_effort_reaches_a_template_that_reads_it() -> None:
    with asking("{{ reasoning_effort }} " + SILENT, "text", ["So."]) as client:
        plain, more = (
            client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "a"}], extra_body=body
            ).usage.prompt_tokens
            for body in ({}, {"reasoning_effort": "abcdef"})
        )
        assert more > plain
        both = {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "low"}
        with pytest.raises(openai.BadRequestError, match="given in chat_template_kwargs too"):
            ask(client, False, extra_body=both)


def test_variables_reach_the_template() -> None:
    with asking(OPENS, "not special", ["So."]) as client:
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        many, few = (
            client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "a"}], extra_body=body
            )
            for body in (off, {"chat_template_kwargs": {}})
        )
        assert many.usage is not None
        assert few.usage is not None
        assert many.usage.prompt_tokens > few.usage.prompt_tokens
        assert many.choices[0].message.content == "So."


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>a</think>b", False, "a", "b"),
        ("\n<think>\na\n</thin</think>\n\nb ", False, "a\n</thin", "b "),
        ("<think>\n\n</think>\n\nb", False, "", "b"),
        ("<think>a</think>\n<think>b</think>\n\nc", False, "ab", "c"),
        ("<think>a</think></think>c", False, "a", "c"),
        ("<thin", False, "", "<thin"),
        ("<thinker>", False, "", "<thinker>"),
        ("b<think>a</think>", False, "", "b<think>a</think>"),
        (" a", True, "a", ""),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("a \n", True, "a", ""),
        ("", True, "", ""),
    ],
)
def test_it_is_read_however_the_text_comes(
    text: str, opened: bool, reasoning: str, content: str, step: int
) -> None:
    reader = AnswerReader(Reading(reasoning=Reasoning("<think>", "</think>", opened)))
    pieces = []
    for start in range(0, len(text), step):
        pieces += reader.push(text[start : start + step])
    pieces += reader.finish()
    assert "".join(piece.reasoning for piece in pieces) == reasoning
    assert "".join(piece.content for piece in pieces) == content
