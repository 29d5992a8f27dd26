"""The loss mask against one built by hand, and the rows that cannot have one."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from medusa_kit.base.gguf import CHATML_TEMPLATE, byte_tokenizer
from medusa_kit.data.chat import encode_conversation, encode_prompt, encode_rows
from medusa_kit.data.readers import AnswerRow, Conversation, Row
from medusa_kit.errors import DataError
from medusa_kit.train.data import head_targets

Messages = list[dict[str, str]]

# Jinja drops a newline right after a tag, so newlines of the text stand in quotes.
TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}" + TAIL
)
END_OUTSIDE = MARKED.replace(
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{%-generation-%}{{ message['content'] }}{%-endgeneration-%}{{ '<|im_end|>' }}",
)
MARKED_ALTERNATING = MARKED.replace(
    "{% for message in messages %}",
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}",
)
ALTERNATING = MARKED_ALTERNATING.replace("{% generation %}", "").replace("{% endgeneration %}", "")
FORGETFUL = (  # as templates do that drop earlier thoughts: only the last turn keeps its text
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last or message['role'] != 'assistant' %}{{ message['content'] }}"
    "{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}{{ '<|im_end|>\n' }}" + TAIL
)
TEMPLATES = {"plain": CHATML_TEMPLATE, "marked": MARKED, "end outside the marks": END_OUTSIDE}


def tokenizer_with(template: str | None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns: tuple[str, str]) -> Messages:
    return [{"role": role, "content": content} for role, content in turns]


def by_hand(messages: Messages) -> tuple[list[int], list[bool]]:
    """ChatML token by token: (ids, mask), up to the last assistant turn's <|im_end|>."""
    tokenizer = byte_tokenizer()
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids: list[int] = []
    mask: list[bool] = []

    def write(tokens: list[int], trained: bool) -> None:
        ids.extend(tokens)
        mask.extend([trained] * len(tokens))

    def bytes_of(text: str) -> list[int]:
        tokens = tokenizer.convert_tokens_to_ids(list(_as_byte_letters(text)))
        assert len(tokens) == len(text.encode())
        return tokens

    for index, message in enumerate(messages):
        trained = message["role"] == "assistant"
        write([start, *bytes_of(message["role"] + "\n")], False)
        write([*bytes_of(message["content"]), end], trained)
        if index < len(messages) - 1:
            write(bytes_of("\n"), False)
    return ids, mask


def _as_byte_letters(text: str) -> str:
    """GPT-2's printable letter for each byte: printable ones stand for themselves, the rest are
    numbered from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return "".join(letters[byte] for byte in text.encode())


CONVERSATIONS = {
    "one turn": chat(("user", "Hi"), ("assistant", "Hello!")),
    "three turns": chat(("user", "a b"), ("assistant", "c"), ("user", "d"), ("assistant", "e\nf"),
                        ("user", "g"), ("assistant", "h")),
    "a system message": chat(("system", "Be short."), ("user", "q"), ("assistant", "a")),
    "several bytes a letter": chat(("user", "Größe?"), ("assistant", "日本 🙂")),
    "white space": chat(("user", " q "), ("assistant", " a \n\n")),
    "the answer stands in the question": chat(("user", "Say yes. yes"), ("assistant", "yes"),
                                              ("user", "yes"), ("assistant", "yes")),
    "the user speaks in markup": chat(("user", "assistant\nyes"), ("assistant", "assistant\n")),
    "two answers in a row": chat(("user", "q"), ("assistant", "a"), ("assistant", "b")),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_mask_is_the_one_built_by_hand(name: str, template: str) -> None:
    ids, mask = by_hand(CONVERSATIONS[name])
    tokenizer = tokenizer_with(TEMPLATES[template])
    example = encode_conversation(tokenizer, CONVERSATIONS[name], row=4)
    assert example.input_ids == ids
    assert example.loss_mask == mask
    assert example.row == 4


def test_what_follows_the_last_answer_is_left_out() -> None:
    messages = chat(("user", "q"), ("assistant", "a"), ("user", "thanks"))
    ids, mask = by_hand(messages[:2])
    for template in TEMPLATES.values():
        example = encode_conversation(tokenizer_with(template), messages)
        assert (example.input_ids, example.loss_mask) == (ids, mask)


def test_a_prompt_is_the_beginning_of_its_conversation() -> None:
    """What is trained on comes right after what the model is asked."""
    messages = CONVERSATIONS["three turns"]
    example = encode_conversation(byte_tokenizer(), messages)
    for last_user in (0, 2, 4):
        prompt = encode_prompt(byte_tokenizer(), messages[: last_user + 1])
        assert example.input_ids[: len(prompt)] == prompt
        assert example.loss_mask[len(prompt) - 1 : len(prompt) + 1] == [False, True]


def test_prompts_as_text() -> None:
    tokenizer = byte_tokenizer()
    assert encode_prompt(tokenizer, "Hi") == encode_prompt(tokenizer, chat(("user", "Hi")))
    plain = tokenizer_with(None)
    assert plain.decode(encode_prompt(plain, "Hi")) == "Hi"
    assert encode_prompt(plain, chat(("user", "Hi"))) == encode_prompt(plain, "Hi")
    with pytest.raises(DataError, match="2 messages, but this tokenizer has no chat template"):
        encode_prompt(plain, chat(("system", "s"), ("user", "Hi")))
    for tokenizer in (plain, byte_tokenizer()):
        with pytest.raises(DataError, match=r"character 3 of a message is U\+DCFF"):
            encode_prompt(tokenizer, "Hi\udcff")


def test_no_template_no_conversation() -> None:
    with pytest.raises(DataError, match="no chat template"):
        encode_conversation(tokenizer_with(None), CONVERSATIONS["one turn"])


def test_a_template_that_edits_earlier_turns() -> None:
    """What it renders is trained on, which is told."""
    tokenizer = tokenizer_with(FORGETFUL)
    thinking = chat(("user", "q"), ("assistant", "<think>hm</think>a"), ("user", "r"),
                    ("assistant", "<think>so</think>b"))  # fmt: skip
    seen = chat(("user", "q"), ("assistant", "a"), ("user", "r"),
                ("assistant", "<think>so</think>b"))  # fmt: skip
    (example,), report = encode_rows([conversation(thinking, 3)], tokenizer, 2048)
    assert (example.input_ids, example.loss_mask) == by_hand(seen)
    assert report.edited == [3]
    assert "changes the words of 1 rows" in report.notes()[0]
    for whole in (thinking[:2], CONVERSATIONS["three turns"]):  # nothing to drop
        (example,), report = encode_rows([conversation(whole, 1)], tokenizer, 2048)
        assert (example.input_ids, example.loss_mask) == by_hand(whole)
        assert report.notes() == []


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation -%}", "{%generation%}"])
def test_marks_tell_the_answer_even_where_earlier_turns_are_edited(mark: str) -> None:
    template = FORGETFUL.replace(
        "{{ message['content'].split('</think>')[-1] }}",
        mark + "{{ message['content'].split('</think>')[-1] }}{% endgeneration %}",
    ).replace(
        "!= 'assistant' %}{{ message['content'] }}",
        "!= 'assistant' %}{% if message['role'] == 'assistant' %}"
        + mark + "{{ message['content'] }}{% endgeneration %}"
        "{% else %}{{ message['content'] }}{% endif %}",
    )  # fmt: skip
    thinking = chat(("user", "q"), ("assistant", "<think>hm</think>a"), ("user", "r"),
                    ("assistant", "<think>so</think>b"))  # fmt: skip
    seen = chat(("user", "q"), ("assistant", "a"), ("user", "r"),
                ("assistant", "<think>so</think>b"))  # fmt: skip
    example = encode_conversation(tokenizer_with(template), thinking)
    assert (example.input_ids, example.loss_mask) == by_hand(seen)


@pytest.mark.parametrize(
    "messages", [chat(("user", "q")), chat(("system", "s"), ("user", "q")), []]
)
def test_nothing_to_train_on(messages: Messages) -> None:
    with pytest.raises(DataError, match="row 9 has no assistant turn"):
        encode_conversation(byte_tokenizer(), messages, row=9)


# Rows: what is skipped and counted, what is fatal, what is cut.


def conversation(messages: Messages, row: int) -> Conversation:
    return Conversation(messages, row, None, "rows.jsonl")


REFUSED = chat(("assistant", "I start"), ("user", "q"), ("assistant", "a"))


@pytest.mark.parametrize("template", [ALTERNATING, MARKED_ALTERNATING])
def test_a_template_that_refuses(template: str) -> None:
    tokenizer = tokenizer_with(template)
    good = CONVERSATIONS["one turn"]
    rows = [conversation(good, 1), conversation(REFUSED, 2), conversation(good, 3)]
    with pytest.raises(DataError, match=r"row 2: .*roles must alternate"):
        encode_rows(rows, tokenizer, 2048, on_error="fail")
    examples, report = encode_rows(rows, tokenizer, 2048)
    assert [example.row for example in examples] == [1, 3]
    assert [example.loss_mask for example in examples] == [by_hand(good)[1]] * 2
    assert [row for row, _ in report.skipped] == [2]
    assert "roles must alternate" in report.skipped[0][1]


def test_rows_are_counted() -> None:
    tokenizer = byte_tokenizer()
    answer = AnswerRow([5, 6, 7], [8, 9], "length", "a", 2)
    rows = [conversation(CONVERSATIONS["one turn"], 1), answer,
            AnswerRow([5], [], "length", "b", 3), conversation(chat(("user", "q")), 4)]  # fmt: skip
    examples, report = encode_rows(rows, tokenizer, 2048)
    assert examples[1].input_ids == [5, 6, 7, 8, 9]
    assert examples[1].loss_mask == [False, False, False, True, True]
    assert report.skipped == [
        (3, "row 3 has an empty answer"),
        (4, "row 4 has no assistant turn, so there is nothing to train on"),
    ]
    ids, mask = by_hand(CONVERSATIONS["one turn"])
    assert (report.tokens, report.trained_tokens) == (len(ids) + 5, sum(mask) + 2)
    assert report.truncated == 0
    with pytest.raises(DataError, match="row 3 has an empty answer"):
        encode_rows(rows, tokenizer, 2048, on_error="fail")


def test_long_rows_are_cut() -> None:
    messages = CONVERSATIONS["three turns"]
    ids, mask = by_hand(messages)
    first_trained = mask.index(True)
    for length in (first_trained + 1, len(ids) - 1, len(ids)):
        (example,), report = encode_rows([conversation(messages, 1)], byte_tokenizer(), length)
        assert (example.input_ids, example.loss_mask) == (ids[:length], mask[:length])
        assert report.truncated == (length < len(ids))
    with pytest.raises(DataError, match=f"the first {first_trained} tokens is the assistant"):
        encode_rows([conversation(messages, 1)], byte_tokenizer(), first_trained)


def test_what_the_cut_costs_is_counted() -> None:
    short, long = CONVERSATIONS["one turn"], CONVERSATIONS["three turns"]
    late = chat(("user", "a question that fills the row alone " * 4), ("assistant", "late"))
    length = len(by_hand(short)[0])
    masks = [by_hand(messages)[1] for messages in (short, long, late)]
    rows = [conversation(messages, row) for row, messages in enumerate((short, long, late), 1)]
    _, report = encode_rows(rows, byte_tokenizer(), length)
    trained = sum(masks[0]) + sum(masks[1][:length])
    cut = sum(masks[1][length:]) + sum(masks[2])
    assert (report.truncated, report.trained_tokens, report.trained_tokens_cut) == (2, trained, cut)
    assert [row for row, _ in report.skipped] == [3], "a row cut to nothing"
    assert report.summary(length) == (
        f"2 rows, {trained} trained tokens ({trained / (2 * length):.1%} of {2 * length}); "
        f"2 truncated at {length} tokens, {cut / (trained + cut):.1%} of the trained tokens lost"
    )
    _, report = encode_rows(rows, byte_tokenizer(), 2048)
    assert (report.truncated, report.trained_tokens_cut) == (0, 0)
    assert report.trained_tokens == sum(map(sum, masks))
    assert report.summary(2048).endswith("; 0 truncated at 2,048 tokens, 0.0% of the trained "
                                         "tokens lost")  # fmt: skip


def test_no_row_left() -> None:
    rows = [conversation(chat(("user", "q")), row) for row in (1, 2)]
    with pytest.raises(DataError, match=r"no row is left .*\(2 skipped, the first: row 1 has no"):
        encode_rows(rows, byte_tokenizer(), 64)
    with pytest.raises(DataError, match=r"no row is left to train on \(0 skipped\)"):
        encode_rows([], byte_tokenizer(), 64)


EMPTY_SOURCES: dict[str, tuple[list[Row], int, str]] = {
    "no answer": ([Conversation(chat(("user", "q")), row, None, "bad.jsonl") for row in (7, 8)],
                  2, "row 7 has no assistant turn"),
    "empty answers": ([AnswerRow([1], [], "stop", None, 3, None, "bad.jsonl")],
                      1, "row 3 has an empty answer"),
    "cut to nothing": ([AnswerRow([1] * 64, [2], "stop", None, 5, None, "bad.jsonl")],
                       1, "row 5: none of the first 64 tokens is the assistant"),
}  # fmt: skip


@pytest.mark.parametrize("case", EMPTY_SOURCES)
def test_a_source_that_is_empty_after_masking_is_named(case: str) -> None:
    bad, skipped, reason = EMPTY_SOURCES[case]
    good = conversation(CONVERSATIONS["one turn"], 1)
    with pytest.raises(DataError) as caught:
        encode_rows([good, *bad, good], byte_tokenizer(), 64)
    assert caught.value.message.startswith(
        f"bad.jsonl: no row is left to train on ({skipped} skipped, the first: {reason}"
    )
    assert "docs/data.md" in (caught.value.hint or "")
    mended = Conversation(good.messages, 9, None, "bad.jsonl")
    examples, report = encode_rows([good, *bad, mended], byte_tokenizer(), 64)
    assert len(examples) == 2
    assert report.sources["bad.jsonl"].skipped == skipped


# Conversations of several turns, with each kind of template, as rows.

SEVERAL_TURNS = [name for name, messages in CONVERSATIONS.items()
                 if [m["role"] for m in messages].count("assistant") > 1]  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL_TURNS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_rows_of_several_turns(name: str, template: str) -> None:
    ids, mask = by_hand(CONVERSATIONS[name])
    second_turn = mask.index(True, mask.index(False, mask.index(True))) + 1
    for length in (second_turn, len(ids)):
        rows = [conversation(CONVERSATIONS[name], 1), conversation(CONVERSATIONS[name], 2)]
        examples, report = encode_rows(rows, tokenizer_with(TEMPLATES[template]), length)
        assert [(e.input_ids, e.loss_mask) for e in examples] == [(ids[:length], mask[:length])] * 2
        assert (report.tokens, report.trained_tokens) == (2 * length, 2 * sum(mask[:length]))
        assert report.trained_tokens_cut == 2 * sum(mask[length:])


@pytest.mark.parametrize("name", SEVERAL_TURNS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_no_head_looks_across_the_end_of_a_turn(name: str, template: str) -> None:
    """Each token is replaced by its place, so that a target says where it was taken from."""
    _, mask = by_hand(CONVERSATIONS[name])
    tokenizer, num_heads = tokenizer_with(TEMPLATES[template]), 3
    for length in (len(mask), len(mask) - 1):
        (example,), _ = encode_rows([conversation(CONVERSATIONS[name], 1)], tokenizer, length)
        item = head_targets(replace(example, input_ids=list(range(length))), num_heads)
        expected = {
            place - 1: [place + ahead if place + ahead < end else -1
                        for ahead in range(num_heads + 1)]
            for start, end in turns_of(mask[:length]) for place in range(start, end)
        }  # fmt: skip
        assert dict(zip(item.positions_P.tolist(), item.ahead_PJ.tolist(), strict=True)) == expected
    assert len(turns_of(mask)) == [m["role"] for m in CONVERSATIONS[name]].count("assistant")


def turns_of(mask: list[bool]) -> list[tuple[int, int]]:
    """(first place, one past the last) of every run the assistant wrote."""
    edges = [i for i, (a, b) in enumerate(pairwise([False, *mask, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))
