"""A tree that was found for other heads than those beside it is not used."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_engines import random_heads
from support.tiny_models import tiny_base

from medusa_kit.base.model import BaseModel
from medusa_kit.engine.before_loading import check_heads
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_reading import read_heads
from medusa_kit.engine.load import build_engine, with_heads
from medusa_kit.errors import TreeError
from medusa_kit.heads import save_heads
from medusa_kit.heads.checkpoint import stored_digest
from medusa_kit.heads.convert import convert
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree

TREE = CandidateTree.chain(2)
Load = Callable[[Path], object]


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return tiny_base("llama")


@pytest.fixture(scope="module")
def plain(base: BaseModel) -> Engine:
    return build_engine(base)


@pytest.fixture
def folder(base: BaseModel, tmp_path: Path) -> Path:
    """Heads with a tree that was found for them."""
    save_heads(random_heads(base), tmp_path / "heads")
    said = {"heads": stored_digest(tmp_path / "heads"), **base.origin}
    save_tree(TREE, tmp_path / "heads/tree.json", {**said, "table": []})
    return tmp_path / "heads"


@pytest.fixture(params=["load", "served", "before"])
def loading(request: pytest.FixtureRequest, plain: Engine) -> Load:
    return {
        "load": lambda folder: with_heads(plain, folder),
        "served": lambda folder: read_heads(plain, folder, "name"),
        "before": lambda folder: check_heads("debug-tiny", None, folder, None, True, True),
    }[request.param]


def trained_again(base: BaseModel, folder: Path) -> None:
    heads = random_heads(base)
    with torch.no_grad():
        next(heads.parameters()).add_(0.1)
    save_heads(heads, folder)


def test_a_tree_of_these_heads_needs_no_word(
    loading: Load, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loading(folder)
    assert "tree.json" not in capsys.readouterr().err


def test_a_tree_of_other_heads_is_refused(base: BaseModel, loading: Load, folder: Path) -> None:
    trained_again(base, folder)
    with pytest.raises(TreeError, match=r"tree.json was made with other heads") as caught:
        loading(folder)
    assert "tree-search" in (caught.value.hint or "")
    assert "--tree" in (caught.value.hint or "")


def test_a_tree_of_another_base_is_refused_unless_forced(plain: Engine, folder: Path) -> None:
    record = json.loads((folder / "tree.json").read_text())
    (folder / "tree.json").write_text(json.dumps({**record, "base_fingerprint": "2:other:one"}))
    with pytest.raises(TreeError, match="another base model"):
        with_heads(plain, folder)
    assert with_heads(plain, folder, force=True).tree == TREE


def edited(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "rope_parameters": {**config["rope_parameters"], "rope_theta": 7.0}}


@pytest.mark.parametrize("loading", ["load", "served"], indirect=True)
def test_a_tree_of_another_config_of_the_base_is_refused(
    base: BaseModel, loading: Load, folder: Path
) -> None:
    """The weights are the same ones, so the fingerprint is."""
    record = json.loads((folder / "tree.json").read_text())
    record["base_config"] = edited(record["base_config"])
    (folder / "tree.json").write_text(json.dumps(record))
    with pytest.raises(TreeError, match=r"another config of the base .*rope_theta.*7\.0"):
        loading(folder)


@pytest.mark.parametrize("loading", ["load", "served"], indirect=True)
def test_heads_of_another_config_of_the_base_are_used_with_a_warning(
    base: BaseModel, loading: Load, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody can tell but the heads: a window or scaling may have been chosen on purpose."""
    path = folder / "config.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "base_config": edited(record["base_config"])}))
    loading(folder)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the config of") == 1
    assert "'rope_theta': 7.0" in said
    (folder / "tree.json").unlink()
    path.write_text(json.dumps({k: v for k, v in record.items() if k != "base_config"}))
    loading(folder)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("config.json does not say with which config of the base") == 1


def test_a_tree_that_is_named_is_used(
    base: BaseModel, plain: Engine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "tree.json"
    trained_again(base, folder)
    assert with_heads(plain, folder, tree=path).tree == TREE
    assert "was made with other heads" in " ".join(capsys.readouterr().err.split())
    path.write_text("[[0], [0, 0]]")
    assert with_heads(plain, folder, tree=path).tree == TREE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("written", ["[[0], [0, 0]]", None])
def test_a_tree_that_does_not_say_has_one_line(
    plain: Engine, folder: Path, written: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand, or by an earlier version."""
    record = json.loads((folder / "tree.json").read_text())
    del record["heads"], record["base_fingerprint"], record["base_config"]
    (folder / "tree.json").write_text(written or json.dumps(record))
    assert with_heads(plain, folder).tree == TREE
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("does not say") == said.count("which heads") == 1


def test_heads_in_another_engines_format(
    base: BaseModel, plain: Engine, folder: Path, tmp_path: Path
) -> None:
    """They are the same heads, and so it is their tree."""
    convert(folder, tmp_path / "vllm", "vllm", base=base)
    (tmp_path / "vllm/tree.json").write_text((folder / "tree.json").read_text())
    assert with_heads(plain, tmp_path / "vllm").tree == TREE
