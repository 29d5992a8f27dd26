"""Weights that are mapped from a file get memory of their own."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from medusa_kit.base.mapped import copy_tensors


def test_weights_that_share_memory_still_do(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(6.0)}, tmp_path / "weights")
    mapped = load_file(tmp_path / "weights")["weight"]
    one, other = (nn.Parameter(mapped, requires_grad=False) for _ in range(2))
    copy_tensors([one, other])
    assert one.data_ptr() == other.data_ptr() != mapped.data_ptr()
    assert torch.equal(one, torch.arange(6.0))
