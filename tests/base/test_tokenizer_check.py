"""What is said of a tokenizer when a base is loaded: only what a user should know."""

from collections.abc import Callable
from typing import Any

import pytest
from support.debug_model import SPECIAL
from support.tiny_models import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_kit.base.gguf import CHATML_TEMPLATE, byte_tokenizer
from medusa_kit.base.model import wrap_model
from medusa_kit.base.tokenizer import say

SPACE = "▁"
ROWS = 400


@pytest.fixture
def notes(capsys: pytest.CaptureFixture[str]) -> Callable[[Any, int], list[str]]:
    def of(tokenizer: Any, rows: int = ROWS) -> list[str]:
        say.say.cache_clear()
        capsys.readouterr()
        wrap_model(tiny_model("llama", vocab_size=rows, eos_token_id=2), tokenizer, "tiny")
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if "rows" in line or "does not keep" in line]

    return of


def byte_level(template: str | None = CHATML_TEMPLATE, **changes: Any) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    for name, value in changes.items():
        setattr(tokenizer.backend_tokenizer, name, value)
    return tokenizer


def sentence_piece(first: str, legacy: bool = False) -> Any:
    """With a token for each byte, and a space first."""
    letters = [SPACE, "\n", *map(chr, range(33, 127)), *(f"<0x{b:02X}>" for b in range(256))]
    vocabulary = {token: i for i, token in enumerate(["<unk>", *SPECIAL, *letters])}
    inner = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if legacy:
        inner.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=first, split=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=SPECIAL[2:], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


def swallowing() -> Any:
    """As Phi-3's, whose special tokens swallow the newline behind them."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True, rstrip=True)])
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True, rstrip=True)])
    return tokenizer


QUIET = {
    "bytes": byte_level,
    "no template": lambda: byte_level(None),
    "a space first": lambda: sentence_piece("first"),
    "a space always": lambda: sentence_piece("always"),
    "legacy": lambda: sentence_piece("", legacy=True),
    "swallowing": swallowing,
    "NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "a template that refuses": lambda: byte_level("{{ raise_exception('no') }}"),
}


@pytest.mark.parametrize("kind", QUIET)
def test_nothing_is_said_of_common_tokenizers(kind: str, notes: Any) -> None:
    assert notes(QUIET[kind]()) == []


def words() -> Any:
    inner = Tokenizer(models.WordPiece({"[UNK]": 0, "words": 1, ",": 2}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


@pytest.mark.parametrize(
    ("make", "was", "now"),
    [
        (
            lambda: byte_level(normalizer=normalizers.Lowercase()),
            "'Words, 12345'",
            "'words, 12345'",
        ),
        (lambda: byte_level(normalizer=normalizers.Replace("  ", " ")), "';  two", "'; two"),
        (words, "'Words, 12345'", "'words"),
    ],
    ids=["lower case", "runs of spaces", "word pieces"],
)
def test_a_tokenizer_that_changes_text_says_where(
    make: Any, was: str, now: str, notes: Any
) -> None:
    (line,) = notes(make())
    assert line.startswith("tiny: its tokenizer does not keep text as it is: ")
    before, after = line.split(": ")[-1].split(" comes back as ")
    assert was.strip("'") in before
    assert now.strip("'") in after


def test_a_template_whose_text_is_changed(notes: Any) -> None:
    tokenizer = byte_level(CHATML_TEMPLATE.replace("<|im_start|>", "ﬁ"))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    (line,) = notes(tokenizer)
    assert "does not keep the chat template's text as it is: 'ﬁuser" in line


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (["<|a|>"], "none for '<|a|>' (259) of"),
        (["<|a|>", "<|b|>", "<|c|>"], "none for '<|a|>' (259) and 2 more tokens of"),
    ],
)
def test_tokens_without_a_row_are_named(added: list[str], said: str, notes: Any) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(added)
    (line,) = notes(tokenizer, 259)
    assert line.startswith("tiny: the model has 259 rows and ")
    assert said in line
    assert notes(tokenizer, 259 + len(added)) == []


def test_a_vocabulary_larger_than_the_model(notes: Any) -> None:
    (line,) = notes(byte_level(), 200)
    assert "and 58 more tokens" in line
    assert "does not keep" not in line


def test_a_tokenizer_that_fails_does_not_keep_a_model_from_loading(notes: Any) -> None:
    tokenizer = byte_level()
    tokenizer.decode = lambda *_, **__: 1 / 0
    assert notes(tokenizer) == []
