"""Heads have one digest wherever they lie and however they are loaded, and others have another."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.small_engines import random_heads
from support.tiny_models import tiny_base

from medusa_kit.base.model import BaseModel
from medusa_kit.heads import load_heads, save_heads
from medusa_kit.heads.checkpoint import read_config, stored_digest, write_config
from medusa_kit.heads.convert import convert
from medusa_kit.heads.kinds import MedusaHeads


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return tiny_base("llama")


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_a_copy_has_the_same_digest(kind: str, base: BaseModel, tmp_path: Path) -> None:
    """In a wider dtype, under another name, saved again from memory."""
    save_heads(random_heads(base, kind=kind), tmp_path / "a", torch.bfloat16)
    digest = stored_digest(tmp_path / "a")
    heads = load_heads(tmp_path / "a", base)
    assert (heads.digest, heads.blocks is not None) == (digest, True)
    named = replace(heads.config, base_model_name="elsewhere", kit_version="0")
    save_heads(heads, tmp_path / "b", config=named)
    assert stored_digest(tmp_path / "b") == load_heads(tmp_path / "b", base).digest == digest


def test_numbers_count_as_they_were_stored(base: BaseModel, tmp_path: Path) -> None:
    """A base in 16 bits rounds heads, and they are the same heads."""
    save_heads(random_heads(base), tmp_path)
    small = tiny_base("llama", dtype=torch.bfloat16)
    assert load_heads(tmp_path, small, force=True).digest == stored_digest(tmp_path)


def test_through_another_engines_format_and_back(base: BaseModel, tmp_path: Path) -> None:
    save_heads(random_heads(base), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "vllm", "vllm", base=base)
    convert(tmp_path / "vllm", tmp_path / "b", "medusa-kit", base=base)
    digests = {stored_digest(tmp_path / name) for name in "ab"}
    assert digests == {load_heads(tmp_path / "vllm", base).digest}


def test_any_other_number_or_meaning_is_another_digest(base: BaseModel, tmp_path: Path) -> None:
    heads = random_heads(base, kind="recurrent")
    digests = {heads.digest}
    for parameter in heads.parameters():
        with torch.no_grad():
            parameter.view(-1)[0] += 1e-6
        digests.add(heads.digest)
    assert len(digests) == 1 + len(list(heads.parameters()))
    digests.add(MedusaHeads.for_base(base, 2, kind="recurrent").digest)
    save_heads(random_heads(base, projection="reduced", reduced_ids=torch.arange(4)), tmp_path)
    one = stored_digest(tmp_path)
    save_heads(random_heads(base, projection="reduced", reduced_ids=torch.arange(1, 5)), tmp_path)
    assert stored_digest(tmp_path) != one


def test_loaded_heads_that_are_written_to_have_another_digest(
    base: BaseModel, tmp_path: Path
) -> None:
    save_heads(random_heads(base), tmp_path)
    heads = load_heads(tmp_path, base)
    next(heads.parameters()).add_(1.0)
    assert heads.digest != stored_digest(tmp_path)


def test_no_heads_have_no_digest(base: BaseModel, tmp_path: Path) -> None:
    assert stored_digest(tmp_path) is None
    write_config(tmp_path, random_heads(base).config)
    assert stored_digest(tmp_path) is None
    assert read_config(tmp_path).num_heads == 3
