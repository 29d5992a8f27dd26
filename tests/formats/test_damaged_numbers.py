"""Heads with numbers that are none are not converted."""

from pathlib import Path

import pytest
from support.same_heads import FP32, base_in, saved

from medusa_kit.errors import CheckpointError
from medusa_kit.heads import save_heads
from medusa_kit.heads.convert import convert


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(tmp_path: Path, number: float) -> None:
    source, heads = saved(tmp_path / "ours")
    heads.blocks[0][0].linear.weight.data[0, 0] = number
    save_heads(heads, source)
    with pytest.raises(CheckpointError, match="NaN or infinite numbers"):
        convert(source, tmp_path / "out", "vllm", base=base_in(FP32))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
