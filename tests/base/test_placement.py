"""Which dtype a base is loaded in: `auto` is the checkpoint's own on CUDA, float32 on a CPU.

There is no CUDA device here: the functions get one as an argument, and loading does not move the
weights.
"""

import inspect
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model
from transformers import Gemma3Config, LlamaConfig

import medusa_kit
from medusa_kit.base import loading as base_loading
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.placement import AUTO, load_dtype, requested_dtype, stored_dtype
from medusa_kit.engine import before_loading
from medusa_kit.errors import ConfigError
from medusa_kit.infer.attention import choice
from medusa_kit.infer.cpu import packed_base as packed_base
from medusa_kit.infer.cpu.packed import int8_weights
from medusa_kit.settings.engine import EngineConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("asked", "device", "stored", "expected"),
    [
        ("auto", CUDA, torch.bfloat16, torch.bfloat16),
        ("auto", CUDA, torch.float16, torch.float16),
        ("auto", CUDA, torch.float32, torch.float32),
        ("auto", CUDA, torch.float8_e4m3fn, torch.float32),
        ("auto", CUDA, None, AUTO),
        ("auto", CPU, torch.bfloat16, torch.float32),
        ("float32", CUDA, torch.bfloat16, torch.float32),
        ("bfloat16", CPU, torch.float32, torch.bfloat16),
        ("float16", CUDA, None, torch.float16),
    ],
)
def test_the_dtype_follows_from_device_and_config(
    asked: str, device: torch.device, stored: Any, expected: Any
) -> None:
    assert load_dtype(requested_dtype(asked, device), LlamaConfig(dtype=stored)) == expected


def test_configs_that_name_a_dtype_in_other_ways() -> None:
    assert stored_dtype(LlamaConfig(dtype="bfloat16")) == torch.bfloat16
    whole = Gemma3Config(dtype="bfloat16")  # the text model's section may say nothing
    whole.text_config.dtype = None
    assert stored_dtype(whole) == torch.bfloat16


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base_loading, before_loading, int8_weights, packed_base):
        monkeypatch.setattr(module, "pick_device", lambda device: CUDA)
    monkeypatch.setattr(base_loading, "_on_device", lambda model, device: model)


@pytest.fixture(params=["named", "not named"])
def half_folder(request: Any, tmp_path: Path) -> str:
    """A checkpoint in bfloat16, whose config says so or does not."""
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if request.param == "not named":
        del config["dtype"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_base_on_cuda_keeps_its_checkpoints_dtype_and_says_so(
    as_on_cuda: None, half_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = load_base_model(half_folder)
    assert (base.dtype, base.info.dtype) == (torch.bfloat16, "bfloat16")
    assert "is loaded in bfloat16, its checkpoint's dtype" in " ".join(
        capsys.readouterr().err.split()
    )
    assert load_base_model(half_folder, dtype="float32").dtype == torch.float32
    assert load_base_model("debug-tiny").dtype == torch.float32
    stats = medusa_kit.load(half_folder).generate([3, 4, 5], max_new_tokens=3).stats
    assert stats.as_dict()["dtype"] == "bfloat16"


def test_a_base_on_a_cpu_is_in_float32(half_folder: str) -> None:
    assert load_base_model(half_folder, device="cpu").dtype == torch.float32


def test_what_is_checked_before_loading_knows_the_dtype(
    as_on_cuda: None, half_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(choice, "check_before_loading", lambda *case: seen.append(case))
    before_loading._check_attention("flash", half_folder, "auto", CUDA, None)
    before_loading._check_attention("flash", half_folder, "float32", CUDA, None)
    named = "dtype" in json.loads((Path(half_folder) / "config.json").read_text())
    expected = [torch.bfloat16] * named + [torch.float32]
    assert seen == [("flash", "cuda", dtype) for dtype in expected]


def test_auto_is_the_default_wherever_a_base_is_loaded() -> None:
    for function in (load_base_model, medusa_kit.load):
        assert inspect.signature(function).parameters["dtype"].default == AUTO
    assert EngineConfig(model="x").dtype == AUTO


def test_a_word_that_is_no_dtype() -> None:
    with pytest.raises(ConfigError, match="dtype 'bfloat' is unknown; expected one of auto"):
        load_base_model("debug-tiny", dtype="bfloat")


def test_a_recipe_keeps_its_own_dtype_and_a_note_suggests_a_smaller_one(
    half_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from medusa_kit.settings.recipe import BaseSection
    from medusa_kit.train.trainer import _note_smaller_dtype

    for dtype, device in (("float32", CUDA), ("bfloat16", CUDA), ("float32", CPU)):
        section = BaseSection(model=half_folder, dtype=dtype)
        recipe: Any = types.SimpleNamespace(base=section, stage="medusa1")
        _note_smaller_dtype(recipe, device)
        named = "dtype" in json.loads((Path(half_folder) / "config.json").read_text())
        told = "base.dtype=bfloat16" in capsys.readouterr().err
        assert told == (named and dtype == "float32" and device == CUDA)
