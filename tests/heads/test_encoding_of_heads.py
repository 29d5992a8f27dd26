"""Heads and trees that were made when text was tokenized differently are used, with one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.small_engines import build_engine, random_heads
from support.text.other_encodings import base_that_reads

from medusa_kit.base.model import BaseModel
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_reading import read_heads
from medusa_kit.errors import CheckpointError
from medusa_kit.heads import load_heads, read_config, save_heads
from medusa_kit.heads.checkpoint import write_config
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree

UNKNOWN, OTHER = (
    "do not say how text was tokenized",
    "were trained on text that was tokenized differently",
)
OLD_TREE = "was found on text that was tokenized differently"
Load = Callable[[BaseModel, Path], Engine]


@pytest.fixture(scope="module")
def now() -> BaseModel:
    return base_that_reads(single_digits=True)


@pytest.fixture(scope="module")
def then() -> BaseModel:
    return base_that_reads(single_digits=False)


def by_name(base: BaseModel, folder: Path) -> Engine:
    """As `load` reads them."""
    return build_engine(base, heads=folder)


def by_request(base: BaseModel, folder: Path) -> Engine:
    """As a server reads them."""
    return read_heads(build_engine(base), folder, "theirs")[0]


def of_heads(folder: Path, base: BaseModel, encoding: str | None, tree: str | None) -> Path:
    heads = random_heads(base)
    save_heads(heads, folder, config=replace(heads.config, encoding=encoding))
    extra = {} if tree is None else {"encoding": tree}
    save_tree(CandidateTree.chain(2), folder / "tree.json", extra)
    return folder


def turns_of(encoding: str | None) -> str:
    """Another chat template, the same tokens of text."""
    return f"{encoding}".rpartition(":")[0] + ":others"


@pytest.mark.parametrize("load", [by_name, by_request])
def test_one_line_says_what_to_do(
    load: Load, now: BaseModel, then: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        (None, None, UNKNOWN, True),
        (None, then.encoding, UNKNOWN, True),
        (None, now.encoding, "", False),  # calibrated since
        (then.encoding, None, OTHER, True),
        (then.encoding, now.encoding, OTHER, False),
        (now.encoding, None, "", False),
        (now.encoding, now.encoding, "", False),
        (turns_of(now.encoding), turns_of(now.encoding), "", False),
        (now.encoding, then.encoding, OLD_TREE, True),
    ]
    for number, (heads, tree, told, with_command) in enumerate(cases):
        folder = of_heads(tmp_path / str(number), now, heads, tree)
        capsys.readouterr()
        engine = load(now, folder)
        lines = [line for line in capsys.readouterr().err.splitlines() if "tokenized" in line]
        assert len(lines) == bool(told)
        assert told in "".join(lines)
        command = f"medusa-kit tree-search -m tiny --heads {folder} --prompts FILE"
        assert (command in "".join(lines)) == with_command
        assert engine.generate([1, 2, 3], max_new_tokens=4).token_ids


def test_a_tree_that_is_named_is_looked_at_in_place_of_the_one_beside(
    now: BaseModel, then: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = of_heads(tmp_path / "heads", now, now.encoding, then.encoding)
    save_tree(CandidateTree.chain(1), tmp_path / "new.json", {"encoding": now.encoding})
    capsys.readouterr()
    build_engine(now, heads=folder, tree=tmp_path / "new.json")
    build_engine(now, heads=folder, tree=[[0]])
    assert "tokenized" not in capsys.readouterr().err


def test_a_base_without_a_tokenizer_has_nothing_to_compare(
    now: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = of_heads(tmp_path, now, now.encoding, None)
    bare = BaseModel(now.model, None, "tiny", "memory")
    build_engine(bare, heads=folder)
    assert "tokenized" not in capsys.readouterr().err
    assert "encoding" not in random_heads(bare).config.as_dict()


def test_the_config_says_how_text_was_encoded(now: BaseModel, tmp_path: Path) -> None:
    save_heads(random_heads(now), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["encoding"] == now.encoding
    assert load_heads(tmp_path, now).config.encoding == now.encoding
    write_config(tmp_path, replace(read_config(tmp_path), encoding=3))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="encoding is 3, expected text"):
        read_config(tmp_path)
