"""Texts that the tokenizer also has as tokens: whatever a mask allows can be written, and what is
returned to the user, without special tokens, is what the grammar says."""

import json
import random
import re
from typing import Any

import pytest
import torch
from support.serving.tagged import tagged_tokenizer

from medusa_kit.errors import MedusaKitError
from medusa_kit.infer.decode.accept.grammar import GrammarMask, grammar_mask
from medusa_kit.settings.grammar import Free, Grammar

TAGS = ["<tool_call>", "</tool_call>", "<think>", "<repo_name>", "<|x|>", "<ü>", "[CALL]"]
STOPS = frozenset([1])
KEY = {"type": "object", "properties": {"<repo_name>": {"enum": ["<think>", "<ü>"]}},
       "required": ["<repo_name>"], "additionalProperties": False,
       "x-guidance": {"whitespace_flexible": False}}  # fmt: skip
WORDS = [
    "<repo_name>",
    "a<think>b",
    "</tool_call>ab<tool_call>",
    "<|x|><|x|>",
    "<tool",
    "[CALL]<ü>",
]


def fits_key(text: str) -> bool:
    return json.loads(text) in ({"<repo_name>": "<think>"}, {"<repo_name>": "<ü>"})


GRAMMARS: list[tuple[str, Grammar, Any]] = [
    ("choices", Grammar.choices(WORDS), lambda text: text in WORDS),
    ("schema", Grammar.json_schema(KEY), fits_key),
    ("const", Grammar.json_schema({"const": "a<tool_call>b"}), lambda t: t == '"a<tool_call>b"'),
    ("regex", Grammar.regex("(a|<t[a-z_]{1,9}>|</?tool_call>){1,4}b"),
     lambda text: re.fullmatch("(a|<t[a-z_]{1,9}>|</?tool_call>){1,4}b", text)),
    ("lark", Grammar.lark('start: "<think>" WORD? "</" WORD ">" // "<x>\nWORD: /[ab<>]{1,3}/'),
     lambda text: re.fullmatch("<think>([ab<>]{1,3})?</[ab<>]{1,3}>", text)),
]  # fmt: skip
TOKENIZERS = {
    "special": tagged_tokenizer(special=TAGS),
    "not special": tagged_tokenizer(plain=TAGS),
    "some special": tagged_tokenizer(special=TAGS[::2], plain=TAGS[1::2]),
    "pieces, special": tagged_tokenizer(special=TAGS, kind="pieces"),
    "pieces, not special": tagged_tokenizer(plain=TAGS, kind="pieces"),
    "none": tagged_tokenizer(),
}


def mask_of(grammar: Grammar, tokenizer: Any) -> GrammarMask:
    return grammar_mask(grammar, tokenizer, len(tokenizer) + 3, STOPS, 0)


def allowed(mask: GrammarMask, tokenizer: Any, answer: list[int]) -> list[int]:
    ids = torch.tensor([answer], dtype=torch.long).reshape(1, -1)
    scores = mask(ids, torch.zeros(1, len(tokenizer) + 3))
    return (scores[0] == 0).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("name", "grammar", "fits"), GRAMMARS)
def test_what_is_allowed_can_be_written(kind: str, name: str, grammar: Grammar, fits: Any) -> None:
    tokenizer, chance, ended = TOKENIZERS[kind], random.Random(0), 0
    mask = mask_of(grammar, tokenizer)
    for _ in range(12):
        answer: list[int] = []
        while len(answer) < 60:
            tokens = allowed(mask, tokenizer, answer)
            assert all(mask.allows([*answer, token]) for token in tokens)
            token = chance.choice(tokens)
            if token in STOPS:
                text = tokenizer.decode(answer, skip_special_tokens=True)
                assert fits(text), text
                ended += 1
                break
            answer.append(token)
    assert ended > 5


def test_a_token_that_is_no_special_one_is_text_like_any_other() -> None:
    """So a model may write what it has learned to write."""
    tokenizer = tagged_tokenizer(plain=["<think>"])
    mask = mask_of(Grammar.regex("<think>a|<b>"), tokenizer)
    think, begin = tokenizer.convert_tokens_to_ids(["<think>", "<"])
    assert set(allowed(mask, tokenizer, [])) == {think, begin}


def test_a_lark_grammar_may_name_tokens_of_either_kind() -> None:
    for tokenizer in (TOKENIZERS["special"], TOKENIZERS["not special"]):
        mask = mask_of(Grammar.lark("start: <think> | <|x|> /a+/"), tokenizer)
        named = tokenizer.convert_tokens_to_ids(["<think>", "<|x|>"])
        assert set(allowed(mask, tokenizer, [])) == set(named)


def test_choices_may_hold_any_character() -> None:
    tokenizer = TOKENIZERS["none"]
    text = "".join(map(chr, range(1, 160))) + "\u2028 é \\ //"
    mask = mask_of(Grammar.choices([text]), tokenizer)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert [allowed(mask, tokenizer, ids[:n]) for n in (0, 5)] == [[ids[0]], [ids[5]]]
    assert mask.allows([*ids, *STOPS])


def test_a_token_that_a_mask_allowed_and_the_matcher_refuses_ends_the_request() -> None:
    tokenizer = TOKENIZERS["none"]
    (first,) = tokenizer("a", add_special_tokens=False).input_ids

    class Refusing:
        """A matcher that allows all tokens, and takes none."""

        def compute_bitmask(self) -> bytes:
            return b"\xff" * (len(tokenizer) // 8 + 1)

        def try_consume_tokens(self, tokens: list[int]) -> int:
            return 0

        def is_error(self) -> bool:
            return False

    mask = GrammarMask(Refusing(), 0, frozenset(STOPS))
    assert first in allowed(mask, tokenizer, [])
    with pytest.raises(MedusaKitError, match=r"allowed token .* and then refused it"):
        allowed(mask, tokenizer, [first])
    fresh = GrammarMask(Refusing(), 0, frozenset(STOPS))  # whose mask nobody has asked for
    assert len(allowed(fresh, tokenizer, [first])) == len(tokenizer) + 3  # a guess


# Free text before a grammar.

CALL, THINK = "<tool_call>", ("<think>", "</think>")
RULES = 'start: "" behind\nbehind: "x" /[0-9]/ tag_0\ntag_0: "</tool_call>"'
BEHIND = Grammar("lark", RULES, tags=("</tool_call>",), free=Free(CALL, THINK))


def written(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_before_a_tag_everything_is_allowed(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    every = len(tokenizer) + 3
    mask = mask_of(BEHIND, tokenizer)
    tag, x = written(tokenizer, CALL), written(tokenizer, "x")[-1:]
    before = written(tokenizer, "a <b>")
    for count in range(len(tag)):
        assert len(allowed(mask, tokenizer, [*before, *tag[:count]])) == every
    assert mask.allows([*before, *STOPS])
    assert mask.forced(before) == []
    bound = [*before, *tag]
    assert allowed(mask, tokenizer, bound) == x
    assert mask.forced(bound) == x
    assert not mask.allows([*bound, *STOPS])
    digit = written(tokenizer, "x7")[-2:]
    end = allowed(mask, tokenizer, [*bound, *digit])
    alone = [tokenizer.convert_tokens_to_ids("</tool_call>")]
    assert (end == alone) == (kind != "none")
    closed = [*bound, *digit, *written(tokenizer, "x</tool_call>")[len(x) :]]
    if kind in ("special", "none"):
        assert allowed(mask, tokenizer, closed) == list(STOPS)
    # back to where all was free
    assert len(allowed(mask, tokenizer, before)) == every


def test_no_tag_counts_in_what_the_model_says_to_itself() -> None:
    tokenizer = TOKENIZERS["not special"]
    every = len(tokenizer) + 3

    def is_free(text: str, free: Free) -> bool:
        mask = mask_of(BEHIND._replace(free=free), tokenizer)
        return len(allowed(mask, tokenizer, written(tokenizer, text))) == every

    for text, free in {
        "<think>a <tool_call>": True, " \n<think><tool_call></think>b": True,
        "<think>a</think><tool_call>": False, "a <think><tool_call>": False,
        "<tool_call>": False,
    }.items():  # fmt: skip
        assert is_free(text, Free(CALL, THINK)) == free, text
    for text, free in {"a <tool_call>": True, "a</think>\n<tool_call>": False}.items():
        assert is_free(text, Free(CALL, THINK, opened=True)) == free, text
    assert not is_free("<think><tool_call>", Free(CALL))
    for text, free in {
        "a <tool_call>": True, " \n<tool_call>": False, "<think>a</think>\n<tool_call>": False,
        "<think><tool_call>": True, "<think>a</think>b<tool_call>": True,
    }.items():  # fmt: skip
        assert is_free(text, Free(CALL, THINK, first=True)) == free, text


def test_a_token_that_ends_a_tag_may_say_more() -> None:
    """What follows is the grammar's; where it cannot be, the tag is text."""
    tokenizer = tagged_tokenizer(plain=[">x", ">y", ">x7"])
    every = len(tokenizer) + 3
    mask = mask_of(BEHIND, tokenizer)
    start = written(tokenizer, "<tool_call")
    more, other, most = tokenizer.convert_tokens_to_ids([">x", ">y", ">x7"])
    digits = written(tokenizer, "0123456789")
    assert allowed(mask, tokenizer, [*start, more]) == sorted(digits)
    assert allowed(mask, tokenizer, [*start, most]) == written(tokenizer, "<")
    assert len(allowed(mask, tokenizer, [*start, other])) == every
    assert allowed(mask, tokenizer, [*start, other, *start, more]) == sorted(digits)
