"""Every type of blocks is read as the gguf package dequantises it, bit for bit.

Shapes: O outputs, I inputs, Q groups of inputs, S inputs of a group.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.gguf.blocks import SIZES, random_rows
from support.gguf.tiny_files import tiny_model, write_model

from medusa_kit.base.gguf import dequantised_folder
from medusa_kit.base.gguf_files import tensors
from medusa_kit.base.gguf_files.header import TensorInfo
from medusa_kit.base.gguf_files.scales import READERS
from medusa_kit.base.gguf_files.tensors import StoredTensor
from medusa_kit.base.stored_tensors import GGUFTensors, SafetensorsFolder, skeleton_of

gguf = pytest.importorskip("gguf")

KINDS = list(SIZES)
HIDDEN, MLP = 32, 256


def test_every_type_is_read_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one and when all are dequantised; a layer of each type, and biases of 16 bits."""
    model = tiny_model(
        "qwen2", hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=len(KINDS)
    )
    raw = {
        f"blk.{layer}.ffn_down.weight": (random_rows(kind, HIDDEN, MLP), kind)
        for layer, kind in enumerate(KINDS)
    }
    path = tmp_path / "model.gguf"
    write_model(path, "qwen2", model, more=raw)
    stored = GGUFTensors(path, skeleton_of(model.config))
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    whole = SafetensorsFolder(dequantised_folder(path), skeleton_of(model.config))
    state = model.state_dict()
    for name in stored.names:
        assert torch.equal(stored.read(name), whole.read(name)), name
        if "down_proj" not in name:
            assert torch.equal(stored.read(name), state[name]), name
    for layer, kind in enumerate(KINDS):
        data, _ = raw[f"blk.{layer}.ffn_down.weight"]
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
        found = stored.read(f"model.layers.{layer}.mlp.down_proj.weight")
        assert np.isfinite(expected).all(), kind
        assert expected.std() > 0, kind
        assert np.array_equal(found.numpy(), expected), kind


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_pieces_have_the_same_numbers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces end anywhere, within rows too, and threads fill them."""
    data = random_rows(kind, 11, 3 * SIZES[kind][0])
    path = tmp_path / "tensor"
    path.write_bytes(data.tobytes())
    monkeypatch.setattr(tensors, "PIECE", 2 * SIZES[kind][0])
    info = TensorInfo("name", (11, 3 * SIZES[kind][0]), kind, 0, data.nbytes)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    for rows in (slice(None), slice(3, 8), np.array([9, 0, 4])):
        assert np.array_equal(StoredTensor(path, info).numbers(rows), expected[rows])


@pytest.mark.parametrize("kind", READERS)
def test_scales_give_back_the_weights(kind: str) -> None:
    numbers, size = SIZES[kind]
    assert READERS[kind][0] == size
    data = random_rows(kind, 7, 3 * numbers)
    weights_OI = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    scales_O, offsets_O = READERS[kind][1](data.reshape(7, -1, size))
    scales_OQ1 = scales_O.reshape(7, -1, 1)
    offsets_OQ1 = np.float32(0) if offsets_O is None else offsets_O.reshape(7, -1, 1)
    weights_OQS = weights_OI.reshape(7, scales_OQ1.shape[1], -1)
    assert weights_OQS.shape[2] in (16, 32)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes_OQS = np.where(scales_OQ1 == 0, 0, (weights_OQS - offsets_OQ1) / scales_OQ1)
    codes_OQS = codes_OQS.round().astype(np.int8).astype(np.float32)
    assert np.array_equal(codes_OQS * scales_OQ1 + offsets_OQ1, weights_OQS)
