"""GGUF files on a device: blocks travel and are dequantised there, to bfloat16 unless asked."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import cuda_stand_in as stand_in
from support.cuda_stand_in import Device
from support.gguf.blocks import SIZES, random_rows
from support.gguf.quantised_files import quantised
from support.gguf.tiny_files import MODELS, tiny_model, write_model

from medusa_kit.base import gguf_on_device
from medusa_kit.base.gguf_files.dequantise import EVERYWHERE, dequantised
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel

gguf = pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", sorted(EVERYWHERE))
def test_blocks_are_dequantised_bit_for_bit(kind: str) -> None:
    rows = random_rows(kind, 7, 3 * max(SIZES[kind][0], 32))
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    found = dequantised(torch.from_numpy(rows.view(np.uint8).copy()), kind).numpy()
    assert expected.std() > 0
    assert np.array_equal(found.view(np.int32), expected.astype(np.float32).view(np.int32))


@pytest.mark.parametrize("architecture", [name for name in MODELS if name != "lfm2"])
@pytest.mark.parametrize(("asked", "dtype"), [("auto", "bfloat16"), ("float32", "float32")])
def test_weights_are_those_of_the_dequantised_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: str, asked: str, dtype: str
) -> None:
    path = quantised(tmp_path / "model.gguf", architecture)
    here = load_base_model(str(path), device="cpu", dtype=dtype)
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "other"))
    with stand_in.installed():
        check_equal(load_base_model(str(path), device="cuda", dtype=asked), here, dtype)
    assert not list((tmp_path / "other").rglob("*.safetensors")), "weights were written"


def check_equal(there: BaseModel, here: BaseModel, dtype: str) -> None:
    assert (there.info.dtype, there.info.device) == (dtype, "cuda:0")
    expected, found = here.model.state_dict(), there.model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu().view(torch.uint8), tensor.view(torch.uint8)), name
    assert there.info.fingerprint == here.info.fingerprint
    assert there.model.generation_config.to_dict() == here.model.generation_config.to_dict()
    ids = torch.tensor([[3, 5, 7]])
    logits = there.model(ids.to("cuda")).logits.cpu()
    assert torch.equal(logits, here.model(ids).logits)


def test_only_blocks_travel_and_no_more_than_a_piece_is_held_in_float32(
    cuda_stand_in: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gguf_on_device, "PIECE", 2560)
    path = quantised(tmp_path / "model.gguf", "llama")
    sent, held, most = list[tuple[int, torch.dtype]](), [0], [0]
    to_device, there = gguf_on_device.to_device, gguf_on_device.dequantised

    def counted(values: torch.Tensor, device: torch.device) -> Any:
        sent.append((values.nbytes, values.dtype))
        return to_device(values, device)

    def watched(raw: torch.Tensor, kind: str) -> torch.Tensor:
        numbers = there(raw, kind)
        held[0] += numbers.numel()
        most[0] = max(most[0], held[0])
        count = numbers.numel()
        weakref.finalize(numbers, lambda: held.__setitem__(0, held[0] - count))
        return numbers

    monkeypatch.setattr(gguf_on_device, "to_device", counted)
    monkeypatch.setattr(gguf_on_device, "dequantised", watched)
    load_base_model(str(path), device="cuda")
    assert 0 < most[0] <= 2 * 2560
    in_file = sum(int(one.n_bytes) for one in gguf.GGUFReader(path).tensors
                  if len(one.shape) > 1 and one.tensor_type.name in EVERYWHERE)  # fmt: skip
    assert sum(size for size, dtype in sent if dtype == torch.uint8) == in_file
    assert not [size for size, dtype in sent if dtype == torch.float32]


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16")])
def test_a_file_that_is_not_quantised_keeps_its_dtype(
    cuda_stand_in: Device, tmp_path: Path, kind: str, dtype: str
) -> None:
    model, path = tiny_model("qwen2"), tmp_path / "model.gguf"
    write_model(path, "qwen2", model)
    if kind == "F16":
        large = [one for one in gguf.GGUFReader(path).tensors if len(one.shape) > 1]
        raw = {one.name: (np.array(one.data).astype(np.float16), kind) for one in large}
        path.unlink()
        write_model(path, "qwen2", model, more=raw)
    assert load_base_model(str(path), device="cuda").info.dtype == dtype
