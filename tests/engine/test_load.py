"""Heads and trees find their base: shipped, paired, named, given; errors say what is missing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_engines import BUSHY, build_engine, random_heads
from support.tiny_models import tiny_base

import medusa_kit
from medusa_kit.base.model import BaseModel
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine import load as loading
from medusa_kit.engine.before_loading import read_tree
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import find_heads, with_heads
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError, TreeError
from medusa_kit.heads import save_heads
from medusa_kit.hub.measured import read_measured
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree


@pytest.fixture
def heads_folder(llama: BaseModel, tmp_path: Path) -> Path:
    folder = tmp_path / "heads"
    save_heads(random_heads(llama), folder)
    return folder


def test_tree_beside_the_heads_unless_another_is_given(
    llama: BaseModel, heads_folder: Path, tmp_path: Path
) -> None:
    save_tree(BUSHY, heads_folder / "tree.json", {})
    save_tree(CandidateTree.chain(2), tmp_path / "other.json", {})
    (tmp_path / "choices.json").write_text("[[0], [1]]")
    assert build_engine(llama, heads=heads_folder).tree == BUSHY
    for given, expected in [
        (CandidateTree.chain(1), CandidateTree.chain(1)),
        ([[0], [0, 0]], CandidateTree.chain(2)),
        (tmp_path / "other.json", CandidateTree.chain(2)),
        (str(tmp_path / "choices.json"), CandidateTree([(0,), (1,)])),
    ]:
        assert build_engine(llama, heads=heads_folder, tree=given).tree == expected


def test_without_a_tree_a_chain_and_a_note(
    llama: BaseModel, heads_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    assert build_engine(llama, heads=heads_folder).tree == CandidateTree.chain(3)
    assert "tree-search" in capsys.readouterr().err


def test_loaded_heads_draft_as_the_saved_ones(llama: BaseModel, heads_folder: Path) -> None:
    engine = build_engine(llama, heads=heads_folder)
    hidden = torch.randn(4, 32)
    assert engine.heads is not None
    assert torch.equal(
        engine.heads.candidates(hidden, 5), random_heads(llama).candidates(hidden, 5)
    )
    assert engine.heads_source == str(heads_folder)


def test_auto_takes_paired_heads_then_shipped_ones_then_none(
    chat_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_heads(chat_base, "auto") is None
    shipped = tmp_path / "package" / "assets" / "heads" / "tiny"
    save_heads(random_heads(chat_base), shipped)
    monkeypatch.setattr(loading.importlib.resources, "files", lambda _: tmp_path / "package")
    assert find_heads(chat_base, "auto") == shipped
    for part in (chat_base.model, chat_base.tokenizer):
        part.save_pretrained(tmp_path / "base")
    same = medusa_kit.load(str(tmp_path / "base"), device="cpu")
    assert same.heads_source == str(shipped)  # by fingerprint, wherever the weights lie
    shutil.copytree(shipped, tmp_path / "base" / "medusa_heads")
    paired = medusa_kit.load(str(tmp_path / "base"), device="cpu")
    assert paired.heads_source == str(tmp_path / "base" / "medusa_heads")
    other = tiny_base("llama", seed=1)
    assert find_heads(other, "auto") is None


def test_heads_of_another_base_are_refused_unless_forced(
    heads_folder: Path,
) -> None:
    other = tiny_base("llama", seed=1)
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        build_engine(other, heads=heads_folder)
    assert build_engine(other, heads=heads_folder, force=True).heads is not None


def test_missing_and_impossible(llama: BaseModel, heads_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        build_engine(llama, heads=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="a tree needs heads"):
        build_engine(llama, heads=None, tree=[[0]])
    with pytest.raises(TreeError, match="depth 4"):
        build_engine(llama, heads=heads_folder, tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
    with pytest.raises(TreeError, match=r"gone\.json"):
        build_engine(llama, heads=heads_folder, tree=tmp_path / "gone.json")


def test_untrained_heads_draft_the_bases_own_next_token(llama: BaseModel) -> None:
    heads = build_engine(llama, heads="untrained").heads
    assert heads is not None
    hidden = torch.randn(3, 32)
    expected = llama.head_logits(hidden).argmax(-1)
    for column in heads.candidates(hidden, 1):
        assert torch.equal(column[:, 0], expected)


def test_the_shipped_heads_know_their_base() -> None:
    root = Path(medusa_kit.__file__).parent / "assets" / "heads"
    folders = [config.parent for config in sorted(root.glob("*/config.json"))]
    assert [folder.name for folder in folders] == [
        "qwen2.5-coder-1.5b-instruct",
        "smollm2-135m-instruct",
    ]
    for folder in folders:
        description = json.loads((folder / "config.json").read_text())
        assert description["base_model_name"] == folder.name
        assert loading.shipped_heads(description["base_fingerprint"]) == folder
    assert loading.shipped_heads("no such fingerprint") is None


def test_the_shipped_heads_have_a_tree_and_stay_small() -> None:
    root = Path(medusa_kit.__file__).parent / "assets" / "heads"
    for config in root.glob("*/config.json"):
        assert (config.parent / "heads.safetensors").stat().st_size < 20e6
        assert read_tree(None, config.parent) is not None
        measured = read_measured(config.parent)
        assert measured.plan is not None, "the tree and its statistics are of these heads"
        assert measured.replayed is not None


# Who drafts.


@pytest.fixture
def suffix(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that stand-ins for the drafters `suffix` and `draft-model` are built with."""
    seen: list[Any] = []

    def build(context: DraftContext, options: Any) -> PlainDrafter:
        seen.append(options)
        return PlainDrafter(context.device)

    monkeypatch.setattr("medusa_kit.drafters.text.suffix.build", build)
    monkeypatch.setattr("medusa_kit.drafters.draft_model.drafter.build", build)
    return seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "sufix"}, "did you mean suffix"),
        ({"drafter": "suffix", "drafter_options": {"nodes": 3}}, "did you mean num_nodes"),
        ({"drafter_options": {"num_nodes": 3}}, "num_nodes.* without a drafter"),
        ({"drafter": "draft-model"}, "needs a smaller model"),
        ({"fallback": "draft-model"}, "needs a smaller model"),
        ({"fallback": "sufix"}, "fallback 'sufix' is unknown.*\n.*suffix"),
    ],
)
def test_wrong_drafters_are_refused_before_anything_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        medusa_kit.load("./nowhere", **options)


def test_an_engine_drafts_as_it_was_told(llama: BaseModel, suffix: list[Any]) -> None:
    told = {"drafter": "suffix", "drafter_options": {"num_nodes": 5}}
    engine = build_engine(llama, heads=random_heads(llama), draft_model="small", **told)
    other = with_heads(engine, None)
    for one in (engine, other):
        assert (one.own_drafter, one.draft_model) == ("suffix", "small")
        one.generate([5, 6], max_new_tokens=2)
    assert [options.num_nodes for options in suffix] == [5, 5]
    assert engine.generate([5], max_new_tokens=3, drafter="medusa").stats.drafter == "medusa"
    other.memory.remembered("kept", int)
    assert len(engine.memory) == 0


def test_who_drafts_unless_told(llama: BaseModel, suffix: list[Any]) -> None:
    heads = random_heads(llama)
    plain = build_engine(llama)
    assert (plain.own_drafter, with_heads(plain, heads).own_drafter) == ("none", "medusa")
    assert replace(plain, draft_model="small").own_drafter == "draft-model"
    falling = replace(plain, fallback="suffix")
    assert (falling.own_drafter, with_heads(falling, heads).own_drafter) == ("suffix", "medusa")
    falling.generate([5, 6], max_new_tokens=2)
    assert len(suffix) == 1
    said = replace(plain, drafter="none", fallback="suffix")
    assert said.own_drafter == "none", "a drafter that reads no heads needs no fallback"


@pytest.fixture(scope="module")
def elsewhere() -> Engine:
    """A plain engine on which heads of the base `llama` do not fit."""
    return build_engine(tiny_base("llama", seed=1))


@pytest.mark.parametrize(
    ("told", "own"),
    [
        ({"drafter": "auto"}, "auto"),
        ({"draft_model": "small"}, "draft-model"),
        ({"fallback": "suffix"}, "suffix"),
        ({"drafter": "medusa", "fallback": "suffix"}, "suffix"),
        ({"drafter": "auto", "fallback": "suffix"}, "suffix"),
    ],
)
def test_heads_that_do_not_fit_are_left_out_where_something_else_drafts(
    elsewhere: Engine,
    heads_folder: Path,
    capsys: pytest.CaptureFixture,
    told: dict[str, Any],
    own: str,
) -> None:
    engine = with_heads(replace(elsewhere, **told), heads_folder, tree=[[0]])
    assert (engine.heads, engine.heads_source, engine.own_drafter) == (None, None, own)
    assert engine.heads_refused is not None
    assert "fingerprint" in engine.heads_refused
    assert f"continuing without heads: {engine.heads_refused}" in capsys.readouterr().err
    assert with_heads(engine, heads_folder, force=True).heads_refused is None


def test_heads_that_do_not_fit_stay_an_error_else(elsewhere: Engine, heads_folder: Path) -> None:
    for told in ({"drafter": "medusa", "draft_model": "small"}, {"drafter": "suffix"}):
        with pytest.raises(IncompatibleBaseError, match="fingerprint"):
            with_heads(replace(elsewhere, **told), heads_folder)


def test_an_engine_from_a_file(tmp_path: Path, suffix: list[Any]) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model: debug-tiny\ndevice: cpu\nheads: untrained\n"
                    "drafter: {name: suffix, options: {num_nodes: 3}}\n")  # fmt: skip
    assert medusa_kit.load_config(path, drafter="none").drafter_options == {}
    engine = medusa_kit.load_config(path, dtype="bfloat16")
    assert (engine.own_drafter, engine.base.info.dtype) == ("suffix", "bfloat16")
    assert engine.heads is not None
    assert engine.drafter_options == {"num_nodes": 3}
