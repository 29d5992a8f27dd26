"""Heads of other engines that cannot be used are refused before the base is loaded, and once."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.foreign_folders import D, put, random_parts, vllm, vllm_config
from support.tiny_models import tiny_model

import medusa_kit
from medusa_kit.base.model import wrap_model
from medusa_kit.engine import load as loading
from medusa_kit.errors import CheckpointError, IncompatibleBaseError


class Loaded(Exception):
    """A base was loaded."""


@pytest.fixture
def no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise Loaded

    monkeypatch.setattr(loading, "base_for_decoding", load)


def heads_in(folder: Path) -> Path:
    parts = random_parts()
    return put(folder, vllm_config(parts), model=vllm(parts))


def test_of_another_size(no_base: None, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleBaseError, match=f"vllm heads do not fit .* size {D} ≠ 64"):
        medusa_kit.load("debug-tiny", heads=heads_in(tmp_path))


def test_cut_off(no_base: None, tmp_path: Path) -> None:
    os.truncate(heads_in(tmp_path) / "model.safetensors", 3000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        medusa_kit.load("debug-tiny", heads=tmp_path)


def test_a_tree_that_they_cannot_fill(no_base: None, tmp_path: Path) -> None:
    heads_in(tmp_path)
    with pytest.raises(medusa_kit.MedusaKitError, match="depth 4"):
        medusa_kit.load("debug-tiny", heads=tmp_path, tree=[[0], [0, 0], [0, 0, 0], [0] * 4],
                        drafter="auto")  # fmt: skip


def test_what_their_config_says_otherwise_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = wrap_model(tiny_model("llama"))
    base.model.save_pretrained(tmp_path / "base")
    parts = random_parts()
    put(tmp_path / "heads", vllm_config(parts, hidden_size=33), model=vllm(parts))
    medusa_kit.load(str(tmp_path / "base"), heads=tmp_path / "heads", device="cpu")
    assert capsys.readouterr().err.count("hidden_size is 33") == 1
