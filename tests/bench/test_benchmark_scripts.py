"""Scripts of benchmarks/ say in a line what they lack."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def call(name: str, *arguments: str) -> None:
        monkeypatch.syspath_prepend(SCRIPTS)
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.chdir(tmp_path)
        importlib.import_module(name).main()

    return call


def test_a_chart_without_figures(run: Any) -> None:
    with pytest.raises(SystemExit, match=r"no figures at .*; run this without --draw-only first"):
        run("llama_cpp", "--draw-only")


def test_a_recording_without_pyte(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fcntl")
    monkeypatch.setitem(sys.modules, "pyte", None)
    with pytest.raises(SystemExit) as leaving:
        run("record_chat", "--help")
    assert leaving.value.code == 0
    assert "Record a real chat" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="`make recording` installs it"):
        run("record_chat", "chat.svg")


def test_random_blocks_are_weights_of_ordinary_size(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("random_gguf")
    for kind in (*script.SCALES, *script.FLOATS):
        raw = script.random_blocks(kind, 2048, 0.02, np.random.default_rng(1))
        number = gguf.GGMLQuantizationType[kind]
        floats = {"F32": np.float32, "F16": np.float16}
        weights = gguf.dequantize(raw.view(floats.get(kind, np.uint8)), number)
        assert abs(weights.mean()) < 0.003, kind  # Q4_0 has one code more below 0
        assert 0.018 < weights.std() < 0.022, kind


def test_a_random_file_has_the_mix_of_q4_k_m(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's for a Llama of 16 layers that is tied, and of 32 that is not."""
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("random_gguf")
    for preset, finer, embedding in (("1B", 8, "Q6_K"), ("8B", 16, "Q4_K")):
        found = script.tensors(script.PRESETS[preset], "Q4_K_M")
        for name in ("attn_v", "ffn_down"):
            kinds = [kind for key, (_, kind) in found.items() if name in key]
            assert kinds.count("Q6_K") == finer, name
        assert found["token_embd.weight"][1] == embedding
        assert found.get("output.weight", [None, None])[1] == (None if preset == "1B" else "Q6_K")
