"""Replies of servers that are no answers, or not quite: what becomes of them."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.distill.openai_client import Endpoint, encode_again
from medusa_kit.errors import DataError, MedusaKitError

ASK = [{"role": "user", "content": "Hi"}]
END = byte_tokenizer().eos_token_id


def answer(
    monkeypatch: pytest.MonkeyPatch, choice: dict[str, Any], ids: bool = False, **usage: int
) -> tuple[list[int], str, bool]:
    """To a prompt that the server continues."""
    raw = json.dumps({"choices": [choice], "usage": usage}).encode()
    monkeypatch.setattr(Endpoint, "ask", lambda self, body, read: raw)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return Endpoint("http://a/v1", "served", return_token_ids=ids).answer(ASK, tokenizer)


@pytest.mark.parametrize("text", [["a"], 12, {"a": 1}, True])
def test_a_text_that_is_none(monkeypatch: pytest.MonkeyPatch, text: Any) -> None:
    with pytest.raises(MedusaKitError, match="no completion"):
        answer(monkeypatch, {"text": text, "finish_reason": "length"})


def test_half_a_character_refuses_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="half of a surrogate pair"):
        answer(monkeypatch, {"text": "so \ud83d", "finish_reason": "length"})


@pytest.mark.parametrize("ids", [["a"], [1.5], [True], [-1], 7, "7"])
def test_ids_that_are_none(monkeypatch: pytest.MonkeyPatch, ids: Any) -> None:
    with pytest.raises(DataError, match="expected token ids"):
        answer(monkeypatch, {"text": "a", "token_ids": ids, "finish_reason": "length"}, ids=True)


def test_an_end_that_is_counted_but_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As servers do that send no stop tokens; others send it, and an answer may be nothing else."""
    ended = {"text": "", "finish_reason": "stop"}

    def ids(sent: list[int], counted: int) -> list[int]:
        return answer(monkeypatch, {**ended, "token_ids": sent}, True, completion_tokens=counted)[0]

    assert ids([7, 8], 3) == [7, 8, END]
    assert ids([7, 8, END], 3) == [7, 8, END]
    assert ids([], 1) == [END]
    assert ids([7, 8], 2) == [7, 8], "a stop text has no token of its own"


def test_an_end_that_is_part_of_the_text_is_not_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, _, _ = answer(monkeypatch, {"text": "ok<|im_end|>", "finish_reason": "stop"})
    assert ids == [*byte_tokenizer()("ok").input_ids, END]


def test_a_continuation_is_encoded_as_one() -> None:
    """Such a tokenizer puts a space before whatever begins a text."""
    words = ["<unk>", "\u2581", *"abcdexhnsw.1\n", "\u2581a", "\u2581s", "an", "\u2581an"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("\u2581", "a"), ("\u2581", "s"), ("a", "n"), ("\u2581", "an")]
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Replace("\u2581", " ")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    whole = tokenizer("and sh").input_ids
    space, letters = [vocabulary["\u2581s"], vocabulary["h"]], [vocabulary["s"], vocabulary["h"]]
    assert encode_again(tokenizer, " sh", "length", goes_on=True) == whole[-2:] == space
    assert encode_again(tokenizer, " sh", "length") == space  # behind a prompt, as it has a space
    assert encode_again(tokenizer, "sh", "length", goes_on=True) == letters
    assert encode_again(tokenizer, "sh", "length") == space


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content", "reasoning"])
def test_an_answer_of_which_a_part_comes_apart_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The text alone is not what the model wrote; its token ids are."""
    message = {"role": "assistant", "content": "a", key: "more"}
    whole = {"message": message, "finish_reason": "length"}
    with pytest.raises(DataError, match=f"a part of the answer as '{key}'") as caught:
        answer(monkeypatch, whole)
    assert "--return-token-ids" in (caught.value.hint or "")
    assert answer(monkeypatch, {**whole, "token_ids": [7]}, True)[0] == [7]
    empty = {"message": {**message, key: None}, "finish_reason": "length"}
    assert answer(monkeypatch, empty)[0] == byte_tokenizer()("a").input_ids
