"""`medusa-kit convert`, and foreign folders where a command takes heads."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.debug_model import MODEL, ROOT, plain_text

Run = Callable[..., tuple[int, str, str]]
PROMPT = "Name a tree."
D, V = 64, 259  # debug-tiny
ASSETS = ROOT / "medusa_kit/assets/heads"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Two heads as FasterDecoding publishes them, under a config that speaks of one."""
    torch.manual_seed(3)
    tensors = {}
    for i in range(2):
        tensors[f"{i}.0.linear.weight"] = torch.randn(D, D) / 8
        tensors[f"{i}.0.linear.bias"] = torch.randn(D)
        tensors[f"{i}.1.weight"] = torch.randn(V, D)
    folder = tmp_path / "foreign"
    folder.mkdir()
    torch.save(tensors, folder / "medusa_lm_head.pt")
    config = {"base_model_name_or_path": "debug-tiny", "medusa_num_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_foreign_folder_drafts_and_the_words_stay(run: Run, foreign: Path) -> None:
    code, out, err = run("generate", PROMPT, *MODEL, "--heads", foreign, "-n", "8")
    assert code == 0
    assert out == plain_text(PROMPT) + "\n"
    assert err.count("heads in format fd-v1 (2 heads of 1 block") == 1
    assert "medusa_num_heads is 1, but by the file's tensors it is 2: 2 is used" in err


def test_convert_to_vllm_prints_how_to_serve(run: Run, foreign: Path, tmp_path: Path) -> None:
    to = tmp_path / "vllm"
    code, out, err = run("convert", foreign, to, "--to", "vllm", "--base-name", "org/base")
    assert code == 0
    assert out == (
        "vllm serve org/base --speculative-config "
        + shlex.quote(f'{{"method":"medusa","model":"{to}","num_speculative_tokens":2}}')
        + "\n"
    )
    assert f"wrote {to} for vllm" in err
    assert "sizes were not checked" in err
    code, out, _ = run("generate", PROMPT, *MODEL, "--heads", to, "-n", "8")
    assert (code, out) == (0, plain_text(PROMPT) + "\n")


def test_convert_to_ours_takes_the_fingerprint(run: Run, foreign: Path, tmp_path: Path) -> None:
    to = tmp_path / "ours"
    code, out, _ = run("convert", foreign, to, "--to", "medusa-kit", "--model", "debug-tiny")
    assert (code, out) == (0, "")
    code, out, err = run("generate", PROMPT, *MODEL, "--heads", to, "-n", "8")
    assert (code, out) == (0, plain_text(PROMPT) + "\n")
    assert "could not be verified" not in err


def test_the_narrow_ways_out(run: Run, foreign: Path, tmp_path: Path) -> None:
    code, out, err = run("convert", foreign, foreign, "--to", "tgi")
    assert (code, out) == (2, "")
    assert "would overwrite" in err
    code, _, err = run("convert", foreign, tmp_path / "x", "--to", "tgi-v9")
    assert code == 2
    assert "'tgi-v9' cannot be written" in err
    code, _, err = run("convert", tmp_path / "nowhere", tmp_path / "x", "--to", "tgi")
    assert code == 1
    assert "no heads at" in err
    os.truncate(foreign / "medusa_lm_head.pt", 4000)
    code, _, err = run("convert", foreign, tmp_path / "x", "--to", "tgi")
    assert code == 1
    assert "cannot be read" in err
    assert "Traceback" not in err


def test_a_base_of_other_sizes_is_refused(run: Run, foreign: Path, tmp_path: Path) -> None:
    tensors = {name: t.clone() for name, t in torch.load(foreign / "medusa_lm_head.pt").items()}
    for i in range(2):
        tensors[f"{i}.1.weight"] = torch.randn(V + 1, D)
    save_file(tensors, foreign / "medusa_lm_head.safetensors")
    assert len(load_file(foreign / "medusa_lm_head.safetensors")) == 6
    call = ["convert", foreign, tmp_path / "x", "--to", "tgi", "--model", "debug-tiny"]
    code, _, err = run(*call)
    assert code == 1
    assert "vocabulary size 260 ≠ 259" in err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("to", "engine", "key"), [
    ("vllm", "vllm", "heads.kind=medusa"), ("lorax", "tgi", "heads.projection=shared"),
])  # fmt: skip
def test_heads_that_no_other_engine_loads_are_refused_before_the_base_is_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, engine: str, key: str
) -> None:
    """With the command that trains the right ones; the heads are those of the package."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("the base was read")

    monkeypatch.setattr("medusa_kit.base.loading.load_base_model", read)
    name = "smollm2-135m-instruct"
    code, out, err = run("convert", ASSETS / name, tmp_path / "out", "--to", to, "-m", name)
    assert (code, out) == (2, "")
    assert "kind 'recurrent'" in err
    said = " ".join(err.split())
    assert f"medusa-kit train --quick --for {engine} -m {name} --prompts PROMPTS" in said
    assert key in said
    code, _, err = run("convert", tmp_path / "gone", tmp_path / "out", "--to", to, "-m", name)
    assert (code, "no heads at" in err) == (1, True)
    assert not (tmp_path / "out").exists()
