"""What is wrong with heads, trees and options is told before a base is loaded, and a base without a
tokenizer answers token ids."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_engines import BUSHY, random_heads
from support.tiny_models import STOP, tiny_model
from transformers import AutoConfig, GenerationConfig

import medusa_kit
from medusa_kit.base.files import resolve
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.engine import load as loading
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError, TreeError
from medusa_kit.heads import MedusaHeads, save_heads
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree


class Loaded(Exception):
    """A base was loaded."""


@pytest.fixture
def no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> BaseModel:
        raise Loaded

    monkeypatch.setattr(loading, "base_for_decoding", load)


@pytest.fixture
def heads(chat_base: BaseModel, tmp_path: Path) -> Path:
    """Three heads for debug-tiny, with a tree."""
    folder = tmp_path / "heads"
    save_heads(random_heads(chat_base), folder)
    save_tree(BUSHY, folder / "tree.json", {})
    return folder


def no_heads(folder: Path) -> None:
    (folder / "config.json").unlink()


def cut_off(folder: Path) -> None:
    os.truncate(folder / "heads.safetensors", 400)


def another_size(folder: Path) -> None:
    save_heads(random_heads(wrap_model(tiny_model("llama"))), folder)


def another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_blocks": 2}))


def broken_tree(folder: Path) -> None:
    (folder / "tree.json").write_text("{")


def deep_tree(folder: Path) -> None:
    save_tree(CandidateTree.chain(4), folder / "tree.json", {})


WRONG: dict[str, tuple[Callable[[Path], Any], dict[str, Any], type[Exception], str]] = {
    "no heads": (no_heads, {}, CheckpointError, r"config\.json is missing"),
    "cut off": (cut_off, {}, CheckpointError, "cannot be read"),
    "of another shape": (another_shape, {}, CheckpointError, r"blocks\.0\.1\.linear.* is missing"),
    "of another base": (another_size, {}, IncompatibleBaseError, "hidden size 32 ≠ 64"),
    "a broken tree": (broken_tree, {}, TreeError, r"tree\.json"),
    "a tree too deep": (deep_tree, {}, TreeError, "depth 4"),
    "a list too deep": (str, {"tree": [[0], [0, 0], [0, 0, 0], [0] * 4]}, TreeError, "depth 4"),
    "no such tree": (str, {"tree": "gone.json"}, TreeError, r"gone\.json"),
    "no such draft model": (str, {"draft_model": "./gone"}, CheckpointError,
                            r"draft model '\./gone': no model at gone"),
    "no such draft model inside": (
        str, {"draft_model": "debug-tiny", "drafter": "draft-model", "drafter_options": {
            "staged": {"drafter": "draft-model", "draft_model": "./gone"}}},
        CheckpointError, r"draft model '\./gone': no model at gone"),
    "a draft model that is none": (str, {"draft_model": 3}, ConfigError, "draft_model 3 is of type "
                                   "int; expected text or a base model"),
    "heads that are none": (str, {"heads": 3}, ConfigError, "heads 3 is of type int; expected"),
    "a tree that is none": (str, {"tree": 3}, ConfigError, "tree 3 is of type int; expected"),
    "no such device": (str, {"device": "gpu"}, ConfigError, "device 'gpu' is unknown"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_told_before_a_base_is_loaded(no_base: None, heads: Path, case: str) -> None:
    spoil, options, kind, message = WRONG[case]
    spoil(heads)
    with pytest.raises(kind, match=message):
        medusa_kit.load("debug-tiny", **{"heads": heads, "device": "cpu", **options})


def test_heads_that_something_else_can_stand_in_for_are_left_to_loading(
    no_base: None, heads: Path
) -> None:
    with pytest.raises(Loaded):
        medusa_kit.load("debug-tiny", heads=heads, device="cpu")
    another_size(heads)
    for told in ({"drafter": "auto"}, {"fallback": "suffix"}, {"draft_model": "debug-tiny"}):
        with pytest.raises(Loaded):
            medusa_kit.load("debug-tiny", heads=heads, device="cpu", **told)


def test_a_tree_without_heads(no_base: None) -> None:
    with pytest.raises(ConfigError, match=r"a tree needs heads to fill it.* for 'debug-tiny'"):
        medusa_kit.load("debug-tiny", heads=None, tree=[[0]])
    with pytest.raises(TreeError, match="depth 5"):
        medusa_kit.load("debug-tiny", heads="untrained", tree=CandidateTree.chain(5))


def test_paired_heads_are_looked_at_too(no_base: None, heads: Path, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    heads.rename(tmp_path / "base" / "medusa_heads")
    with pytest.raises(IncompatibleBaseError, match="hidden size 64 ≠ 32"):
        medusa_kit.load(str(tmp_path / "base"))


def test_a_family_that_projects_its_hidden_state_is_not_mistaken(tmp_path: Path) -> None:
    """The config's hidden size is not what heads of this one read."""
    base = wrap_model(tiny_model("opt", word_embed_proj_dim=16))
    assert base.info.hidden_size == 16 != base.config.hidden_size
    base.model.save_pretrained(tmp_path / "base")
    heads = MedusaHeads.for_base(base, 2).requires_grad_(False)
    save_heads(heads, tmp_path / "heads")
    engine = medusa_kit.load(str(tmp_path / "base"), heads=tmp_path / "heads", device="cpu")
    assert engine.heads is not None


# A base's own files.


def test_a_generation_config_is_read_before_the_weights(no_base: None, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(Loaded):
        medusa_kit.load(str(tmp_path), heads=None)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 4}))
    with pytest.raises(ConfigError, match="num_beams=4"):
        medusa_kit.load(str(tmp_path), heads=None)


def test_a_folder_without_a_tokenizer_answers_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, prompt = tiny_model("llama"), [5, 6, 7]
    model.save_pretrained(tmp_path)
    engine = medusa_kit.load(str(tmp_path), heads="untrained", device="cpu")
    assert "holds no tokenizer: prompts and answers are token ids" in capsys.readouterr().err
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
    expected = out[0, 3:].tolist()
    result = engine.generate(prompt, max_new_tokens=12)
    assert (result.token_ids, result.text) == (expected, "")
    streaming = engine.stream(prompt, max_new_tokens=12)
    assert list(streaming) == []
    assert streaming.result.token_ids == expected
    assert engine.base.stop_token_ids == {STOP}
    with pytest.raises(ConfigError, match="without a tokenizer"):
        engine.generate("words")
    with pytest.raises(ConfigError, match="'end' needs a tokenizer"):
        engine.generate(prompt, stop="end")


def test_a_tokenizer_that_is_damaged_stays_an_error(chat_base: BaseModel, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_base_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("name", ["smollm2-135m-instuct", "SmolLM2-135M-Instruct", "debug-tny"])
def test_a_misspelled_name_is_not_looked_for_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked = []
    for kind in (AutoConfig, GenerationConfig):
        monkeypatch.setattr(kind, "from_pretrained", lambda *args, **_: asked.append(args))
    with pytest.raises(CheckpointError, match=r"did you mean (smollm2-135m-instruct|debug-tiny)"):
        medusa_kit.load(name, device="cpu")
    assert asked == []
    monkeypatch.setattr("medusa_kit.base.names._cached", lambda: ["distilgpt2"])
    assert resolve("distilgpt2") == ("hub", "distilgpt2")


def test_the_random_model_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network each try takes seconds."""
    asked = []
    monkeypatch.setattr(GenerationConfig, "from_pretrained", lambda *args, **_: asked.append(args))
    medusa_kit.load("debug-tiny", device="cpu")
    assert asked == []
