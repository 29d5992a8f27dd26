"""The digest of an encoding depends on what text becomes, and on nothing else."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.text.other_encodings import base_that_reads, with_pairs
from transformers import AutoTokenizer

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.remembered_configs import read_tokenizer
from medusa_kit.base.tokenizer.encoding_digest import Encodings, compare, encoding_digest


@pytest.fixture(scope="module")
def joined() -> str:
    return str(encoding_digest(with_pairs(single_digits=False)))


def changed(**attributes: Any) -> Any:
    tokenizer = with_pairs(single_digits=False)
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def test_tokenizers_of_one_vocabulary_that_cut_otherwise_differ(joined: str) -> None:
    single, other = with_pairs(single_digits=True), with_pairs(single_digits=False)
    assert single.get_vocab() == other.get_vocab()
    assert compare(encoding_digest(single), joined) is Encodings.OTHER
    assert encoding_digest(other) == joined


def test_special_tokens_before_a_text_count(joined: str) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = with_pairs(single_digits=False)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A",
        special_tokens=[("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))],
    )
    assert tokenizer("a", add_special_tokens=False).input_ids == with_pairs(True)("a").input_ids
    assert compare(encoding_digest(tokenizer), joined) is Encodings.OTHER


@pytest.mark.parametrize("attributes", [{"chat_template": "{{ messages }}"},
                                        {"chat_template": None}, {"bos_token": "<|im_start|>"},
                                        {"eos_token": "<|im_start|>"}])  # fmt: skip
def test_what_makes_a_conversation_is_told_apart_from_what_encodes_text(
    joined: str, attributes: dict[str, Any]
) -> None:
    assert compare(encoding_digest(changed(**attributes)), joined) is Encodings.OTHER_TURNS


def test_tokens_that_end_an_answer_are_the_bases_where_it_has_some(joined: str) -> None:
    base = base_that_reads(single_digits=False)
    assert base.encoding == joined
    base.generation_config.eos_token_id = [1, 2]
    assert compare(base.encoding, joined) is Encodings.OTHER_TURNS


def test_how_it_was_loaded_and_used_does_not_count(joined: str, tmp_path: Path) -> None:
    tokenizer = with_pairs(single_digits=False)
    template = tokenizer.chat_template.replace("\n", "\r\n") + "\n"
    assert encoding_digest(changed(chat_template=template)) == joined
    assert encoding_digest(changed(chat_template={"default": tokenizer.chat_template})) == joined
    assert encoding_digest(changed(model_max_length=3, padding_side="left")) == joined
    tokenizer.save_pretrained(tmp_path)
    remembered = [read_tokenizer(str(tmp_path)) for _ in range(2)]
    for one in (*remembered, AutoTokenizer.from_pretrained(tmp_path)):
        assert encoding_digest(one) == joined
    tokenizer(["a", "b c"], padding="max_length", truncation=True, max_length=2)
    assert encoding_digest(tokenizer) == joined
    tokenizer.backend_tokenizer.enable_truncation(1)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert encoding_digest(tokenizer) == joined


@pytest.mark.slow
def test_another_process_finds_the_same() -> None:
    program = (
        "from medusa_kit.base.loading import load_base_model as load;"
        "print(load('debug-tiny', device='cpu').encoding)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == load_base_model("debug-tiny", device="cpu").encoding


def test_tokenizers_of_their_own_kind_and_none() -> None:
    def refuses_newlines(text: str, add_special_tokens: bool = True) -> Any:
        if "\n" in text:
            raise KeyError(text)
        return SimpleNamespace(input_ids=[ord(character) for character in text])

    assert str(encoding_digest(refuses_newlines)).startswith("1:")
    for nothing in (None, object(), lambda text: 1 / 0):
        assert encoding_digest(nothing) is None


def test_what_is_not_known_is_neither_the_same_nor_another(joined: str) -> None:
    later = joined.replace("1:", "2:", 1)
    for other in (None, later, "text"):
        assert compare(joined, other) is Encodings.UNKNOWN
        assert compare(other, joined) is Encodings.UNKNOWN
