"""Rows of many messages are encoded in few renderings, to the tokens and masks of one by one."""

import json
import random
from typing import Any

import pytest

from medusa_kit.base.gguf import CHATML_TEMPLATE, byte_tokenizer
from medusa_kit.data import rendered, shown, turns
from medusa_kit.data.chat import encode_conversation
from medusa_kit.errors import DataError

EACH = "{% for m in messages %}"
ASK = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
HEADER = "{{ '<|im_start|>' + m['role'] + '\n' }}"
TEMPLATES = {
    "chatml": CHATML_TEMPLATE,
    "trimmed": EACH + HEADER + "{{ m['content'] | trim + '<|im_end|>\n' }}" + ASK,
    "no special tokens": EACH + "{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
    "an end only behind answers": EACH + "{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + "
    "'<|im_end|>' }}{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}",
    "no header": EACH + "{{ m['content'] + '<|im_end|>' }}{% endfor %}",
    "nothing between": EACH + "{{ m['content'] }}{% endfor %}",
    "another first turn": EACH + "{% if loop.first %}{{ '<|im_start|>' }}{% endif %}" + HEADER +
    "{{ m['content'] + '<|im_end|>\n' }}" + ASK,
    "an end at the end": EACH + HEADER + "{{ m['content'] }}{% if loop.last %}{{ '<|im_end|>' }}"
    "{% endif %}" + ASK,
    "thoughts are dropped": EACH + HEADER + "{{ m['content'].split('</think>')[-1] + "
    "'<|im_end|>\n' }}" + ASK,
    "numbered": EACH + "{{ '<|im_start|>' ~ loop.index ~ m['role'] ~ '\n' ~ m['content'] ~ "
    "'<|im_end|>\n' }}" + ASK,
    "counted in pairs": EACH + "{{ '<|im_start|>' if loop.index0 % 4 < 2 else '' }}{{ m['role'] + "
    "'\n' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\n' }}"
    "{% endif %}",
    "more is asked with": EACH + HEADER + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
    "marks": EACH + HEADER + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + "
    "'<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}" + ASK,
    "a word twice": EACH + HEADER + "{{ m['content'] + m['content'] + '<|im_end|>\n' }}" + ASK,
    "the last three": "{% for m in messages[-3:] %}" + HEADER + "{{ m['content'] + '<|im_end|>' }}"
    + ASK,
}  # fmt: skip
SAID = ("yes", "yes", " a", "b \n", "x", "a b", "<|im_end|>", "assistant: yes", "hm</think>so",
        "\n", "", "user", "0")  # fmt: skip
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


CALLS = (
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + WRITTEN + '</tool_call>' }}{% endfor %}"
)
THOUGHT = (
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
)
NAMED = "{{ '<|im_start|>' + m['role'] + (' ' + m['name'] if m['name'] else '') + '\n' }}"
WHOLE = EACH + NAMED + THOUGHT + "{{ m['content'] or '' }}" + CALLS + "{{ '<|im_end|>\n' }}" + ASK
ARGUMENTS = "c['function']['name'] + ' ' + c['function']['arguments'] | tojson"
LAST = THOUGHT.replace("{% if ", "{% if loop.last and ")
WITH_CALLS = {
    "JSON": WHOLE.replace("WRITTEN", ARGUMENTS + ""),
    "whole calls": WHOLE.replace("WRITTEN", "c['function'] | tojson"),
    "compact": WHOLE.replace("WRITTEN", ARGUMENTS + "(separators=(',', ':'))"),
    "indented": WHOLE.replace("WRITTEN", ARGUMENTS + "(indent=2)"),
    "sorted": WHOLE.replace("WRITTEN", ARGUMENTS + "(sort_keys=true)"),
    "arguments as text": WHOLE.replace("WRITTEN", "c['function']['arguments']"),
    "parameters": WHOLE.replace("'<tool_call>' + WRITTEN", "'<tool_call>' }}{% for k, v in "
                                "c['function']['arguments'].items() %}{{ k ~ '=' ~ v ~ ',' }}"
                                "{% endfor %}{{ ''"),
    "the last thoughts": WHOLE.replace(THOUGHT, LAST).replace("WRITTEN", ARGUMENTS),
    "calls first": EACH + NAMED + THOUGHT + CALLS.replace("WRITTEN", ARGUMENTS) +
    "{{ m['content'] or '' }}{{ '<|im_end|>\n' }}" + ASK,
    "words or calls": EACH + NAMED + THOUGHT + "{% if m['tool_calls'] %}" +
    CALLS.replace("WRITTEN", ARGUMENTS) + "{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}" + ASK,
    "no calls": EACH + NAMED + "{{ m['content'] }}{{ '<|im_end|>\n' }}" + ASK,
}  # fmt: skip
GIVEN = ({}, {"a": 1}, {"b": "x", "a": [1, 2]}, {"a": "\u00e9\n"}, {"a": {"b": None}}, {"é": "}"})


def conversation_with_calls(seed: int) -> list[dict[str, Any]]:
    drawn, messages = random.Random(seed), list[dict[str, Any]]()
    for turn in range(drawn.randrange(2, 12)):
        messages.append({"role": "user", "content": drawn.choice(SAID) + "?"})
        calls = [{"type": "function", "function": {"name": "f", "arguments": drawn.choice(GIVEN)}}
                 for _ in range(drawn.randrange(3))]  # fmt: skip
        said = drawn.choice(("", "so", " yes ")) if calls else "well"
        answer: dict[str, Any] = {"role": "assistant", "content": said}
        if calls:
            answer["tool_calls"] = calls
        if seed % 2 and drawn.random() < 0.5:
            answer["reasoning_content"] = drawn.choice(("hm", "so"))
        messages.append(answer)
        messages += [{"role": "tool", "name": "f", "content": drawn.choice(SAID)} for _ in calls]
        if seed % 3 == 0:
            messages[-1]["name"] = f"n{turn}"
    return [*messages, {"role": "assistant", "content": "done", "reasoning_content": "hm"}]


def conversation(seed: int) -> list[dict[str, Any]]:
    drawn = random.Random(seed)
    messages = [{"role": "system", "content": "s"}] if seed % 2 else []
    for _ in range(drawn.randrange(2, 12)):
        for role in ("user", "assistant"):
            for _ in range(2 if drawn.random() < 0.1 else 1):
                said = "".join(drawn.choices(SAID, k=drawn.randrange(1, 3)))
                messages.append({"role": role, "content": said if seed % 3 else drawn.choice(SAID)})
    if seed % 5 == 0:
        messages[-1] |= {"weight": 1}
        messages[-2] |= {"name": "n"}
    return messages


def encoded(messages: list[dict[str, Any]], tokenizer: Any, many: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for module in (shown, turns):
            patch.setattr(module, "MANY", many)
        try:
            return encode_conversation(tokenizer, messages)
        except DataError as error:
            return error.message


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_masks_are_those_of_one_by_one(name: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    for seed in range(12):
        messages = conversation(seed)
        assert encoded(messages, tokenizer, 2) == encoded(messages, tokenizer, 10**6), messages


@pytest.mark.parametrize("name", WITH_CALLS)
def test_the_masks_of_rows_with_calls_are_those_of_one_by_one(name: str) -> None:
    tokenizer, told = byte_tokenizer(), set[bool]()
    tokenizer.chat_template = WITH_CALLS[name]
    for seed in range(16):
        messages = conversation_with_calls(seed)
        found = encoded(messages, tokenizer, 2)
        assert found == encoded(messages, tokenizer, 10**6), messages
        told.add(isinstance(found, str))
    assert told == {name == "no calls"} or name == "words or calls"


@pytest.mark.parametrize("name", ["chatml", "trimmed", "no special tokens", "marks", "no header"])
def test_a_long_row_takes_few_renderings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = [{"role": role, "content": f"{role} {n}"} for n in range(100)
           for role in ("user", "assistant")]  # fmt: skip
    assert renderings(TEMPLATES[name], row, monkeypatch) <= 16


@pytest.mark.parametrize(
    "name", [name for name in WITH_CALLS if name not in ("parameters", "no calls")]
)
def test_a_long_row_with_calls_takes_few_renderings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = list[dict[str, Any]]()
    for n in range(50):
        arguments: Any = {"city": f"c{n}"}
        if name == "arguments as text":
            arguments = json.dumps(arguments)
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": "" if n % 2 or "or" in name else "let me see"}
        row += [{"role": "user", "content": f"{n}?"}, {**said, "tool_calls": [call]},
                {"role": "tool", "name": "f", "content": f"rain {n}"},
                {"role": "assistant", "content": f"{n}!", "reasoning_content": "hm"}]  # fmt: skip
    assert renderings(WITH_CALLS[name], row, monkeypatch) <= 24


def renderings(template: str, row: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> int:
    tokenizer, written = byte_tokenizer(), list[int]()
    tokenizer.chat_template = template
    text = rendered.Rendered.text

    def counted(view: Any, messages: Any, ask: bool = False) -> str:
        written.append(len(messages))
        return text(view, messages, ask)

    monkeypatch.setattr(rendered.Rendered, "text", counted)
    encode_conversation(tokenizer, row)
    return len(written)
