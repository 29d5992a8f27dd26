"""A file of heads says which base they learned, wherever it is copied to."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.small_engines import random_heads
from support.tiny_models import tiny_base

from medusa_kit.base.model import BaseModel
from medusa_kit.engine.before_loading import check_heads
from medusa_kit.engine.heads_reading import read_heads
from medusa_kit.engine.load import build_engine, with_heads
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.heads import load_heads, save_heads
from medusa_kit.heads.checkpoint import stored_digest
from medusa_kit.heads.convert import convert
from medusa_kit.hub.measured import read_measured
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree

WEIGHTS = "heads.safetensors"
Use = Callable[[BaseModel, Path], object]
USES: dict[str, Use] = {
    "load_heads": lambda base, heads: load_heads(heads, base),
    "load": lambda base, heads: with_heads(build_engine(base), heads),
    "served": lambda base, heads: read_heads(build_engine(base), heads, "name"),
    "before loading": lambda _, heads: check_heads("debug-tiny", None, heads, None, False, False),
    "convert": lambda base, heads: convert(heads, heads.parent / "vllm", "vllm", base=base),
    "push": lambda _, heads: read_measured(heads),
}


@pytest.fixture(scope="module")
def bases() -> tuple[BaseModel, BaseModel]:
    """Two of the same sizes."""
    return tiny_base("llama"), tiny_base("llama", seed=1)


@pytest.fixture
def heads(bases: tuple[BaseModel, BaseModel], tmp_path: Path) -> Path:
    """Heads of the first base, in whose place lie those of the second."""
    for base, name in zip(bases, ("heads", "other"), strict=True):
        save_heads(random_heads(base), tmp_path / name)
    shutil.copy(tmp_path / "other" / WEIGHTS, tmp_path / "heads")
    return tmp_path / "heads"


@pytest.mark.parametrize("use", USES)
def test_weights_of_another_base_are_refused(
    bases: tuple[BaseModel, BaseModel], heads: Path, use: str
) -> None:
    with pytest.raises(IncompatibleBaseError, match="made with another base model") as caught:
        USES[use](bases[0], heads)
    assert str(heads / WEIGHTS) in caught.value.message
    assert all(base.info.fingerprint in caught.value.message for base in bases)
    assert "config.json" in (caught.value.hint or "")


def test_they_are_used_where_somebody_insists(
    bases: tuple[BaseModel, BaseModel], heads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As heads are on a base that was trained further."""
    assert load_heads(heads, bases[0], force=True).num_heads == 3
    assert "was made with another base model" in " ".join(capsys.readouterr().err.split())
    assert load_heads(heads.parent / "other", bases[0], force=True).num_heads == 3
    assert capsys.readouterr().err == ""


def test_a_quantised_copy_is_no_other_base(
    bases: tuple[BaseModel, BaseModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_heads(random_heads(bases[0]), tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    output = record["base_fingerprint"].split(":")[2]
    record["base_fingerprint"] = f"2q:{'0' * 32}:{output}"
    (tmp_path / "config.json").write_text(json.dumps(record))
    load_heads(tmp_path, bases[0])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("says", [None, {"format": "medusa-kit-heads"}])
def test_a_file_that_does_not_say_it_has_one_line(
    bases: tuple[BaseModel, BaseModel], tmp_path: Path, says: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of an earlier version."""
    save_heads(random_heads(bases[0]), tmp_path)
    save_tree(CandidateTree.chain(2), tmp_path / "tree.json", {"heads": stored_digest(tmp_path)})
    save_file(load_file(tmp_path / WEIGHTS), tmp_path / WEIGHTS, says)
    load_heads(tmp_path, bases[0])
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("could not be checked") == 1
    assert f"{WEIGHTS} does not say with which base model it was made" in said


def test_files_of_other_engines_become_heads_of_the_base_that_was_named(
    bases: tuple[BaseModel, BaseModel], tmp_path: Path
) -> None:
    save_heads(random_heads(bases[0]), tmp_path / "heads")
    for name, to in (("vllm", "vllm"), ("back", "medusa-kit")):
        convert(tmp_path / ("heads" if to == "vllm" else "vllm"), tmp_path / name, to,
                base=bases[0])  # fmt: skip
    with safe_open(tmp_path / "back" / WEIGHTS, "pt") as file:
        assert file.metadata()["base_fingerprint"] == bases[0].info.fingerprint
    assert all(
        torch.equal(one, load_file(tmp_path / "back" / WEIGHTS)[name])
        for name, one in load_file(tmp_path / "heads" / WEIGHTS).items()
    )


def test_the_same_heads_are_the_same_bytes(tmp_path: Path) -> None:
    heads, written = random_heads(tiny_base("llama")), set[bytes]()
    for number in range(16):
        save_heads(heads, tmp_path / str(number))
        written.add((tmp_path / str(number) / WEIGHTS).read_bytes())
    assert len(written) == 1
