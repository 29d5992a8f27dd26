"""Weights that are no numbers: bases of every kind and heads name the tensor that holds them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.foreign_folders import FOLDERS, random_parts
from support.gguf.tiny_gguf import write_gguf
from support.same_heads import FP32, base_in, our_heads
from support.tiny_models import model_of, tiny_base

from medusa_kit.base import adapters
from medusa_kit.base.adapter_layers import AdapterLayers
from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import wrap_model
from medusa_kit.engine.load import load
from medusa_kit.errors import CheckpointError, IncompatibleBaseError
from medusa_kit.heads import load_heads, save_heads
from medusa_kit.infer.chains.choice import self_check
from medusa_kit.settings.recipe import LoraSection

NUMBERS = {"nan": float("nan"), "infinite": float("inf")}
LAYER = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("sound"), byte_tokenizer()
    model_of("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def damaged(folder: Path, place: Path, name: str, number: float) -> Path:
    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    tensors[name].view(-1)[3] = number
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.mark.parametrize(
    ("options", "name", "number"),
    [({}, LAYER, "nan"), ({}, "model.norm.weight", "infinite"), ({"weights": "int8"}, LAYER, "nan"),
     ({"dtype": "bfloat16"}, "model.norm.weight", "nan"),
     ({"attention": "sdpa", "dtype": "float32"}, LAYER, "infinite")],
    ids=["in C++", "in C++, infinite", "rounded", "16 bits", "by torch"],
)  # fmt: skip
def test_a_base_in_a_folder(
    sound: Path, tmp_path: Path, options: dict[str, Any], name: str, number: str
) -> None:
    place = damaged(sound, tmp_path / "base", name, NUMBERS[number])
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinite numbers") as found:
        load(str(place), heads="none", device="cpu", **options)
    assert "spread" not in str(found.value)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_base_in_a_gguf_file(tmp_path: Path, kind: str, dtype: str) -> None:
    import gguf

    path = write_gguf(tmp_path / "damaged.gguf", kind=kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    offset = int(tensors["blk.0.ffn_down.weight"].data_offset)
    raw = np.full(1, np.nan, np.float32 if kind == "F32" else np.float16).tobytes()
    with path.open("r+b") as file:  # a weight, or the scale of a block
        file.seek(offset)
        file.write(raw)
    with pytest.raises(CheckpointError, match=LAYER):
        load(str(path), heads="none", device="cpu", dtype=dtype)


def test_a_base_in_memory_and_one_whose_dtype_is_too_narrow() -> None:
    base = tiny_base("llama")
    base.model.lm_head.weight.data[5, 7] = float("nan")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds NaN"):
        self_check(base)
    base = tiny_base("llama")
    base.model.model.norm.weight.data.fill_(1e30)
    base.model.lm_head.weight.data *= 1e20
    with pytest.raises(
        IncompatibleBaseError, match=r"though all of its weights are finite(.|\n)*--dtype float64"
    ):
        self_check(wrap_model(base.model))


@pytest.mark.parametrize("number", NUMBERS)
def test_heads_of_our_own(tmp_path: Path, number: str) -> None:
    base = base_in(FP32)
    for options in (
        {"kind": "medusa", "projection": "own"}, {"kind": "hydra"}, {"kind": "recurrent"},
    ):  # fmt: skip
        heads = our_heads(**{"projection": "shared", **options})
        for name, tensor in heads.state_dict().items():
            kept = tensor.clone()
            tensor.view(-1)[-1] = NUMBERS[number]
            save_heads(heads, tmp_path / "heads")
            tensor.copy_(kept)
            with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinite"):
                load_heads(tmp_path / "heads", base)


@pytest.mark.parametrize("case", FOLDERS)
def test_heads_of_other_engines(tmp_path: Path, case: str) -> None:
    base = base_in(FP32)
    changes: list[Callable[[Any], torch.Tensor]] = [
        lambda parts: parts.weights[1][0], lambda parts: parts.biases[2][0],
        lambda parts: parts.matrices[0],
    ]  # fmt: skip
    for i, change in enumerate(changes):
        parts = random_parts()
        change(parts).view(-1)[0] = float("nan")
        place = FOLDERS[case][1](tmp_path / str(i), parts)
        with pytest.raises(CheckpointError, match=r"(weight|bias) holds NaN or infinite numbers"):
            load_heads(place, base)


def test_heads_with_numbers_too_large_for_the_base(tmp_path: Path) -> None:
    heads = our_heads(projection="own")
    heads.blocks[0][0].linear.weight.data[0, 0] = 1e5
    save_heads(heads, tmp_path / "heads")
    load_heads(tmp_path / "heads", base_in(FP32))
    half = tiny_base("llama", dtype=torch.float16)
    with pytest.raises(IncompatibleBaseError, match=r"blocks\.0\.0\.linear\.weight holds numbers"):
        load_heads(tmp_path / "heads", half, force=True)


def test_adapters(tmp_path: Path) -> None:
    base = load_base_model("debug-tiny")
    adapters.put_on(base.model, LoraSection(rank=2, alpha=4))
    name, weight = next((n, p) for n, p in base.model.named_parameters() if "lora_B" in n)
    weight.data.view(-1)[0] = float("nan")
    about: Any = {"base_model": "debug-tiny", "revision": None,
                  "base_fingerprint": base.info.fingerprint}  # fmt: skip
    adapters.save_adapter(base.model, tmp_path, about)
    layer = name.split(".lora_B")[0]
    with pytest.raises(CheckpointError, match=f"{layer}.*holds NaN"):
        load(str(tmp_path), heads="none", device="cpu")
    with pytest.raises(CheckpointError, match=f"{layer}.*holds NaN"):
        AdapterLayers(tmp_path, load_base_model("debug-tiny"))
