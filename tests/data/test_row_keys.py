"""What a row says is trained on, or the row is skipped with the reason; nothing is dropped."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.text.marked_tokens import marked_tokenizer, trained_runs

from medusa_kit.data.chat import encode_row_prompt, encode_rows
from medusa_kit.data.readers import BadRow, Conversation, read_good_and_bad
from medusa_kit.data.row_keys import refuse_extras
from medusa_kit.errors import DataError

EACH = "{% for m in messages %}{{ '<' + m.role + '>' }}"
ASK = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = EACH + "{{ m.content + '<E>' }}{% endfor %}" + ASK
# shows all that messages have, thoughts of the last one alone
SHOWING = ("{% if tools %}{{ tools | tojson }}{% endif %}" + EACH + "{{ m.name }}"
           "{{ '<think>' + m.reasoning_content + '</think>' if loop.last and m.reasoning_content }}"
           "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
           "{{ c.function.arguments | tojson }}{% endfor %}<E>{% endfor %}" + ASK)  # fmt: skip
ARGUMENTS_AS_TEXT = SHOWING.replace("c.function.arguments | tojson", "':' + c.function.arguments")

CALL = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": '{"at": "here"}'}}
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}]
ASKED, ANSWERED = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "a"}
CALLING = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]},
           {"role": "tool", "name": "rain", "tool_call_id": "1", "content": "no"},
           ANSWERED]  # fmt: skip
NULL_CALLING = [ASKED, {**CALLING[1], "content": None}, *CALLING[2:]]


def tokenizer_of(template: str) -> Any:
    return marked_tokenizer(template, ["<user>", "<assistant>", "<system>", "<tool>"])


def read(tmp_path: Path, row: Any, **options: Any) -> Conversation | BadRow:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (found,) = read_good_and_bad(str(path), **options)
    assert isinstance(found, Conversation | BadRow)
    return found


def trained(tmp_path: Path, row: Any, template: str = SHOWING) -> tuple[list[str], str]:
    """(what is trained on, the whole text)."""
    tokenizer = tokenizer_of(template)
    (example,), _ = encode_rows([read(tmp_path, row, extras=True)], tokenizer, 2048, "fail")
    return trained_runs(tokenizer, example), tokenizer.decode(example.input_ids)


@pytest.mark.parametrize("messages", [CALLING, NULL_CALLING], ids=["empty", "null"])
@pytest.mark.parametrize("template", [SHOWING, ARGUMENTS_AS_TEXT], ids=["objects", "text"])
def test_calls_are_trained_on_where_the_template_writes_them(
    tmp_path: Path, messages: Any, template: str
) -> None:
    runs, text = trained(tmp_path, {"messages": messages, "tools": TOOLS}, template)
    between = ":" if template == ARGUMENTS_AS_TEXT else ""
    assert runs == [f'rain{between}{{"at": "here"}}<E>', "a<E>"]
    assert text.startswith('[{"type": "function"')
    assert "<tool>rainno<E>" in text


def test_tools_and_calls_may_be_json_text(tmp_path: Path) -> None:
    calls = [{**m, "tool_calls": json.dumps(m["tool_calls"])} if "tool_calls" in m else m
             for m in CALLING]  # fmt: skip
    as_text = {"messages": calls, "tools": json.dumps(TOOLS)}
    assert trained(tmp_path, as_text) == trained(tmp_path, {"messages": CALLING, "tools": TOOLS})


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_trained_on_where_the_template_writes_it(tmp_path: Path, key: str) -> None:
    row = {"messages": [ASKED, {**ANSWERED, key: "hm"}, ASKED, {**ANSWERED, key: "so"}]}
    assert trained(tmp_path, row)[0] == ["a<E>", "<think>so</think>a<E>"]
    (_,), report = encode_rows([read(tmp_path, row, extras=True)], tokenizer_of(SHOWING), 2048)
    assert report.edited == [1], "that of the earlier turn is left out, which is told"


DROPPED: dict[str, tuple[Any, str]] = {
    "calls": ({"messages": CALLING}, "'tool_calls' of message 2"),
    "tools": ({"messages": [ASKED, ANSWERED], "tools": TOOLS}, "the row's tools"),
    "reasoning": ({"messages": [ASKED, {**ANSWERED, "reasoning": "hm"}]}, "reasoning_content"),
    "a name": ({"messages": [{**ASKED, "name": "Ann"}, ANSWERED]}, "'name' of message 1"),
    "a tool's name": ({"messages": [ASKED, {"role": "tool", "name": "rain", "content": "no"},
                                    ANSWERED]}, "'name' of message 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", DROPPED)
def test_what_the_template_does_not_show_is_refused(tmp_path: Path, case: str) -> None:
    row, what = DROPPED[case]
    with pytest.raises(DataError, match=f"the chat template does not show {what}"):
        trained(tmp_path, row, PLAIN)
    trained(tmp_path, row, SHOWING)
    found = read(tmp_path, row)
    assert isinstance(found, BadRow), "refused, too, where nobody asks for it"
    assert "is not shown to the model here" in found.reason


def test_words_beside_a_call_are_trained_on_or_refused(tmp_path: Path) -> None:
    """Llama 3.1's template writes the call alone."""
    row = {"messages": [ASKED, {**CALLING[1], "content": "I look."}, *CALLING[2:]]}
    assert trained(tmp_path, row)[0][0].startswith("I look.rain")
    calls_alone = SHOWING.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    with pytest.raises(DataError, match="does not show 'content' of message 2"):
        trained(tmp_path, row, calls_alone)
    assert trained(tmp_path, {"messages": CALLING}, calls_alone)[0][0].startswith("rain")


def test_a_prompt_is_asked_with_all_that_it_says(tmp_path: Path) -> None:
    """Or not at all: as `data generate` asks."""
    tokenizer, plain = tokenizer_of(SHOWING), tokenizer_of(PLAIN)
    assert tokenizer.decode(encode_row_prompt(tokenizer, [ASKED], TOOLS)) == (
        json.dumps(TOOLS) + "<user>Q<E><assistant>"
    )
    named = [{**ASKED, "name": "Ann"}]
    assert "Ann" in tokenizer.decode(encode_row_prompt(tokenizer, named))
    for messages, tools in (([ASKED], TOOLS), (named, None)):
        with pytest.raises(DataError, match="does not show"):
            encode_row_prompt(plain, messages, tools)
        with pytest.raises(DataError, match="no chat template"):
            encode_row_prompt(tokenizer_of(""), messages, tools)
        with pytest.raises(DataError, match="not shown to the model here"):
            refuse_extras(messages, tools)
    refuse_extras([ASKED])


def test_weights_say_what_is_trained_on(tmp_path: Path) -> None:
    bad, good = {**ANSWERED, "content": "bad", "weight": 0}, {**ANSWERED, "weight": 1}
    assert trained(tmp_path, {"messages": [ASKED, bad, ASKED, good]}, PLAIN)[0] == ["a<E>"]
    shared = [{"from": "human", "value": "Q", "weight": 0.0},
              {"from": "gpt", "value": "bad", "weight": 0.0},
              {"from": "human", "value": "Q"},
              {"from": "gpt", "value": "a", "weight": 1.0}]  # fmt: skip
    assert trained(tmp_path, {"conversations": shared}, PLAIN)[0] == ["a<E>"]


SYSTEM = {"role": "system", "content": "S"}
SAME: dict[str, Any] = {
    "system": {"system": "S", "messages": [ASKED, ANSWERED]},
    "system, ShareGPT": {"system": "S", "conversations": [{"from": "human", "value": "Q"},
                                                          {"from": "gpt", "value": "a"}]},
    "system twice": {"system": "S", "messages": [SYSTEM, ASKED, ANSWERED]},
    "system_prompt": {"system_prompt": "S", "question": "Q", "response": "a"},
    "parts": {"messages": [SYSTEM, {**ASKED, "content": [{"type": "text", "text": "Q"}]},
                           {**ANSWERED, "content": [{"type": "text", "text": "a"}]}]},
    "roles in conversations": {"conversation": [SYSTEM, ASKED, ANSWERED]},
    "prompt and completion": {"system": "S", "prompt": "Q", "completion": "a"},
    "messages as prompt": {"prompt": [SYSTEM, ASKED], "completion": [ANSWERED]},
    "question and answer": {"system": "S", "question": "Q", "answer": "a"},
    "instruction and output": {"system": "S", "instruction": "Q", "input": "", "output": "a"},
    "harmless keys": {"messages": [SYSTEM, {**ASKED, "timestamp": 3}, ANSWERED], "id": "x",
                      "source": "s", "metadata": {"a": 1}, "score": 1.0, "weight": 1},
    "the prompt once more": {"prompt": "Q", "messages": [SYSTEM, ASKED, ANSWERED]},
    "a developer": {"messages": [{**SYSTEM, "role": "developer"}, ASKED, ANSWERED]},
    "nothing in other keys": {"messages": [SYSTEM, {**ASKED, "tool_calls": None}, ANSWERED],
                              "tools": [], "input": "", "images": None, "functions": []},
    "no messages beside others": {"messages": [], "conversations": None, "system": "S",
                                  "instruction": "Q", "output": "a"},
    "an answer rated good": {"system": "S", "prompt": "Q", "completion": "a", "label": True},
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_forms_that_say_the_same(tmp_path: Path, case: str) -> None:
    found = read(tmp_path, SAME[case])
    assert isinstance(found, Conversation), found
    assert found.messages == [SYSTEM, ASKED, ANSWERED]
    assert found.unused == ()


FORMS: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "alpaca": ({"instruction": "I", "input": "T", "output": "a", "text": "all of it",
                "prompt": "### Instruction: I ### Input: T"},
               [("user", "I\n\nT"), ("assistant", "a")]),
    "dolly": ({"instruction": "I", "context": "T", "response": "a", "category": "qa"},
              [("user", "I\n\nT"), ("assistant", "a")]),
    "history": ({"instruction": "I", "output": "a", "history": [["q", "b"]]},
                [("user", "q"), ("assistant", "b"), ("user", "I"), ("assistant", "a")]),
    "text": ({"text": "Q"}, [("user", "Q")]),
    "question": ({"question": "Q", "context": "T"}, [("user", "Q\n\nT")]),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_forms_of_the_hub(tmp_path: Path, case: str) -> None:
    row, expected = FORMS[case]
    found = read(tmp_path, row)
    assert isinstance(found, Conversation)
    assert [(m["role"], m["content"]) for m in found.messages] == expected


TALK = [ASKED, ANSWERED]
REFUSED: dict[str, tuple[Any, str]] = {
    "two systems": ({"system": "other", "messages": [SYSTEM, *TALK]}, "differs from its system"),
    "functions": ({"functions": [{"name": "f"}], "messages": TALK}, "'functions' of the row"),
    "documents": ({"documents": ["d"], "messages": TALK}, "'documents' of the row"),
    "template variables": ({"chat_template_kwargs": {"a": 1}, "messages": TALK}, "of the row"),
    "an input": ({"input": "x", "messages": TALK}, "'input' of the row cannot be honoured"),
    "a system of another name": ({"system_instruction": "S", "messages": TALK},
                                 "'system_instruction' of the row"),
    "a key in capitals": ({"System": "S", "messages": TALK}, "'System' of the row"),
    "choices": ({"question": "Q", "choices": ["x", "y"], "answer": "B"}, "'choices' of the row"),
    "an answer rated bad": ({"prompt": "Q", "completion": "a", "label": False}, "'label' of the"),
    "text of the assistant": ({"text": "a", "role": "assistant"}, "'role' of the row"),
    "a longer prompt": ({"instruction": "Translate", "prompt": "Translate: Q", "output": "a"},
                        "'prompt' of the row"),
    "no messages": ({"messages": []}, "'messages' is empty"),
    "nothing asked": ({"prompt": None, "text": ""}, "'prompt' and 'text' is empty"),
    "nothing": ({}, "the row is empty"),
    "another prompt": ({"prompt": "x", "messages": TALK}, "'prompt' of the row"),
    "pictures": ({"images": ["x"], "messages": TALK}, "'images' of the row"),
    "a weight of the row": ({"weight": 0, "messages": TALK}, "'weight' of the row"),
    "reasoning of the row": ({"question": "Q", "reasoning": "r", "answer": "a"}, "'reasoning' of"),
    "two answers": ({"prompt": "Q", "completion": "a", "response": "b"}, "expected one answer"),
    "an answer in a list": ({"question": "Q", "answer": ["a"]}, "a turn lacks"),
    "half a weight": ({"messages": [ASKED, {**ANSWERED, "weight": 0.5}]}, "weight is 0.5"),
    "a weight of the user": ({"messages": [{**ASKED, "weight": 1}, ANSWERED]}, "of the user"),
    "an unknown key": ({"messages": [ASKED, {**ANSWERED, "prefix": True}]}, "has 'prefix'"),
    "an old call": ({"messages": [ASKED, {**ANSWERED, "function_call": {"name": "f"}}]},
                    "has 'function_call'"),
    "a loss": ({"messages": [ASKED, {**ANSWERED, "train": False}]}, "has 'train'"),
    "no content": ({"messages": [ASKED, {**ANSWERED, "content": None}]}, "is null"),
    "calls that are none": ({"messages": [ASKED, {**ANSWERED, "tool_calls": [{"name": "f"}]}]},
                            "tool_calls holds no call"),
    "arguments that are no JSON": ({"messages": [ASKED, {**ANSWERED, "tool_calls": [
        {"function": {"name": "f", "arguments": "{"}}]}]}, "tool_calls holds no call"),
    "tools that are none": ({"tools": "not JSON", "messages": TALK}, "tools is text that is not"),
    "tools in a text": ({"tools": '["f"]', "messages": TALK}, "tools is no list of objects"),
    "calls in a text that is no JSON": ({"messages": [ASKED, {**ANSWERED, "tool_calls": "{"}]},
                                        "tool_calls is text that is not JSON"),
    "a call of a number": ({"messages": [ASKED, {**ANSWERED, "tool_calls": [
        {"function": {"name": 1, "arguments": {}}}]}]},
        "tool_calls holds no call: its name is a number and its arguments are an object, expected"),
    "calls that are no list": ({"messages": [ASKED, {**ANSWERED, "tool_calls": 5}]},
                               "tool_calls holds no call: it is a number, expected a list"),
    "a call that is no object": ({"messages": [ASKED, {**ANSWERED, "tool_calls": [5]}]},
                                 "tool_calls holds no call: a call is a number, expected an obj"),
    "a call without a function": ({"messages": [ASKED, {**ANSWERED, "tool_calls": [{"id": "1"}]}]},
                                  "tool_calls holds no call: it lacks 'function'"),
    "two thoughts": ({"messages": [ASKED, {**ANSWERED, "reasoning": "a", "thinking": "b"}]},
                     "something else than one text"),
    "a name that is none": ({"messages": [{**ASKED, "name": 5}, ANSWERED]}, "name of a message is"),
    "a system that is none": ({"system": ["S"], "messages": TALK}, "expected text"),
    "an input that is none": ({"instruction": "Q", "input": ["x"], "output": "a"}, "input is"),
    "history of another form": ({"prompt": "Q", "history": [{"q": "a"}]}, "history holds"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, case: str) -> None:
    row, reason = REFUSED[case]
    found = read(tmp_path, row, extras=True)
    assert isinstance(found, BadRow)
    assert reason in found.reason


def test_keys_that_mean_nothing_here_are_told(tmp_path: Path) -> None:
    found = read(tmp_path, {"messages": TALK, "verdict": "good", "id": "1"})
    assert isinstance(found, Conversation)
    assert found.unused == ("verdict",)
    _, report = encode_rows([found], tokenizer_of(PLAIN), 64)
    assert any("'verdict' of rows are not used" in note for note in report.notes())


def test_each_reason_for_which_rows_are_skipped_is_counted() -> None:
    rows: list[Conversation | BadRow] = [
        Conversation(TALK if n in (1, 5) else [ASKED], n, None, "f") for n in range(1, 7)
    ]
    rows += [BadRow("content is odd", n, "f") for n in (7, 8)]
    _, report = encode_rows(rows, tokenizer_of(PLAIN), 64)
    assert report.skips() == [
        "4 rows skipped, the first is row 2: it has no assistant turn, so there is nothing to "
        "train on",
        "2 rows skipped, the first is row 7: content is odd",
    ]
