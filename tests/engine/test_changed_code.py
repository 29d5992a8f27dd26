"""Functions of transformers that somebody replaces, as libraries do that make models faster: torch
runs a model then that C++ would run, and calls them. The oracle is transformers' own generate under
the same functions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.changes import answer, made, plain
from support.small_engines import build_engine
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import medusa_kit
from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.cpu.binding.kernels import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ kernels on this machine")
LLAMA = "llama-tied"


def rotated(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
    """Queries that are not rotated."""
    return q * 2, k


def turned(self: Any, x: Any) -> Any:
    return -0.5 * self.down_proj(x[..., :1] * self.up_proj(x))


WAYS = {
    "a function of its module": (modeling_llama, "apply_rotary_pos_emb", rotated),
    "a function of a class": (modeling_llama.LlamaMLP, "forward", turned),
}


def wrapped(folder: Path) -> Engine:
    return build_engine(wrap_model(made(LLAMA)))


def loaded(folder: Path) -> Engine:
    return medusa_kit.load(str(folder), heads=None, device="cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    made(LLAMA).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", [wrapped, loaded])
def test_before_loading(
    way: str, engine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs and checks of an earlier load are of the functions that ran then."""
    usual = engine(folder)
    assert usual.steps_run_by.startswith("C++")
    before = answer(usual)
    monkeypatch.setattr(*WAYS[way])
    now = engine(folder)
    assert now.steps_run_by.startswith("torch")
    assert "was replaced by other code" in now.steps_run_by
    assert answer(now) == plain(made(LLAMA)) != before
    monkeypatch.undo()


@pytest.mark.parametrize("way", WAYS)
def test_after_loading(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = wrapped(folder)
    before = answer(engine)
    with monkeypatch.context() as patch:
        patch.setattr(*WAYS[way])
        assert answer(engine) == plain(made(LLAMA)) != before
        assert engine.verifier.steps_run_by.startswith("torch")
    assert answer(engine) == before
    assert engine.verifier.steps_run_by.startswith("C++")


@pytest.mark.parametrize("options", [{}, {"attention": "sdpa"}])
def test_attention_of_others(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tree attention takes its place, so it must compute the same."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def same(*args: Any, **kwargs: Any) -> Any:
        return sdpa(*args, **kwargs)

    def half(*args: Any, **kwargs: Any) -> Any:
        out, weights = sdpa(*args, **kwargs)
        return out * 0.5, weights

    engine = build_engine(wrap_model(made(LLAMA)), **options)
    before = answer(engine)
    for function in (same, half):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", function)
        if function is same:
            assert answer(engine) == before == plain(made(LLAMA))
            continue
        assert plain(made(LLAMA)) != before
        for ask in (
            lambda: answer(engine),
            lambda: build_engine(wrap_model(made(LLAMA)), **options),
        ):
            with pytest.raises(IncompatibleBaseError, match="cannot be verified"):
                ask()
    monkeypatch.undo()
    assert answer(engine) == before


class BrokenGraph(torch.nn.Module):
    """torch compiles what comes before it and after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.nn.functional.silu(x)


@pytest.mark.slow
def test_code_that_torch_compiles_amid_an_answer() -> None:
    """The compiler puts functions of its own beside the module's; no code is replaced."""
    engine = build_engine(wrap_model(made(LLAMA)), attention="sdpa")
    mlp, named = engine.base.model.model.layers[0].mlp, set(vars(modeling_llama))
    mlp.act_fn = BrokenGraph()
    mlp.compile(backend="eager")
    assert answer(engine) == plain(made(LLAMA))
    assert set(vars(modeling_llama)) > named
