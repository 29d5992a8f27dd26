"""Conversion between formats keeps what heads say of their encoding."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.small_engines import random_heads
from support.text.other_encodings import base_that_reads

from medusa_kit.heads import read_config, save_heads
from medusa_kit.heads.convert import convert

THEN, NOW = base_that_reads(single_digits=False), base_that_reads(single_digits=True)


@pytest.mark.parametrize("encoding", [THEN.encoding, None])
def test_our_own_heads_keep_it(tmp_path: Path, encoding: str | None) -> None:
    heads = random_heads(NOW)
    save_heads(heads, tmp_path / "a", config=replace(heads.config, encoding=encoding))
    convert(tmp_path / "a", tmp_path / "b", "medusa-kit", base=NOW)
    assert read_config(tmp_path / "b").encoding == encoding


def test_heads_of_other_engines_get_that_of_the_base_which_is_named(tmp_path: Path) -> None:
    save_heads(random_heads(NOW), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "vllm", base=NOW)
    convert(tmp_path / "b", tmp_path / "c", "medusa-kit", base=NOW)
    assert read_config(tmp_path / "c").encoding == NOW.encoding
