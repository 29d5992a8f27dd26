"""The loss mask against one built by hand, and the rows that cannot have one."""

from typing import Any

import pytest

from medusa_kit.data.chat import encode_conversation, encode_prompt, encode_rows
from medusa_kit.data.readers import AnswerRow, Conversation
from medusa_kit.embedded import CHATML_TEMPLATE, byte_tokenizer
from medusa_kit.errors import DataError

Messages = list[dict[str, str]]

# Jinja drops a newline right behind a tag, so newlines of the text stand in quotes.
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
    """What is trained on comes right behind what the model is asked."""
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


def test_no_template_no_conversation() -> None:
    with pytest.raises(DataError, match="no chat template"):
        encode_conversation(tokenizer_with(None), CONVERSATIONS["one turn"])


def test_a_template_that_edits_earlier_turns() -> None:
    tokenizer = tokenizer_with(FORGETFUL)
    thinking = chat(("user", "q"), ("assistant", "<think>hm</think>a"), ("user", "r"),
                    ("assistant", "<think>so</think>b"))  # fmt: skip
    with pytest.raises(DataError, match="row 3: the chat template renders earlier turns differ"):
        encode_conversation(tokenizer, thinking, row=3)
    single = encode_conversation(tokenizer, thinking[:2])
    assert single.loss_mask == by_hand(thinking[:2])[1]
    silent = CONVERSATIONS["three turns"]  # nothing to drop: nothing is edited
    assert encode_conversation(tokenizer, silent).loss_mask == by_hand(silent)[1]


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
    with pytest.raises(DataError, match=f"the first {first_trained} tokens hold no assistant"):
        encode_rows([conversation(messages, 1)], byte_tokenizer(), first_trained)


def test_no_row_left() -> None:
    rows = [conversation(chat(("user", "q")), row) for row in (1, 2)]
    with pytest.raises(DataError, match=r"no row is left .*\(2 skipped, the first: row 1 has no"):
        encode_rows(rows, byte_tokenizer(), 64)
    with pytest.raises(DataError, match=r"no row is left to train on \(0 skipped\)"):
        encode_rows([], byte_tokenizer(), 64)
