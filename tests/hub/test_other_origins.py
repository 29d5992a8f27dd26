"""A card has figures of these heads, their tree and the text it was found on, and no others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa_kit.base.model import BaseModel
from medusa_kit.errors import ConfigError
from medusa_kit.heads import MedusaHeads, save_heads
from medusa_kit.heads.checkpoint import stored_digest
from medusa_kit.hub.measured import read_measured
from medusa_kit.tree.plan import load_plan
from medusa_kit.tree.statistics import RankStatistics

NAMES = ("statistics.npz", "tree.json", "bench.json", "verify.json", "provenance.json")


@pytest.fixture
def whole(folder: Path, chat_base: BaseModel) -> Path:
    """The folder with all that its files say today."""
    heads, base = stored_digest(folder), chat_base.origin
    found = RankStatistics.load(folder / "statistics.npz")
    replace(found, meta={**found.meta, **base, "heads": heads}).save(folder / "statistics.npz")
    change(folder / "tree.json", **base, heads=heads, statistics=found.digest)
    tree = load_plan(folder / "tree.json").digest
    change(folder / "bench.json", **base, heads={"medusa-kit": heads}, trees={"medusa-kit": tree})
    greedy = json.loads((folder / "verify.json").read_text())["greedy"]
    change(folder / "verify.json", greedy={**greedy, **base, "heads": heads, "trees": {"": tree}})
    (folder / "provenance.json").write_text(json.dumps({"heads": heads, "recipe": {}}))
    return folder


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_what_was_made_with_these_heads_needs_no_word(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = read_measured(whole)
    assert measured.replayed is not None
    assert (len(measured.benches), len(measured.verify)) == (1, 1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kept", NAMES)
def test_files_of_heads_that_were_there_before_are_refused(
    chat_base: BaseModel, whole: Path, kept: str
) -> None:
    for name in {*NAMES} - {kept, *({"tree.json"} if kept == "statistics.npz" else ())}:
        (whole / name).unlink()
    if kept == "statistics.npz":  # it is read where there is a tree
        (whole / "tree.json").write_text("[[0], [0, 0]]")
    heads = MedusaHeads.for_base(chat_base, 3)
    with torch.no_grad():
        next(heads.parameters()).add_(0.1)
    save_heads(heads, whole)
    with pytest.raises(ConfigError, match=rf"{kept} .*other heads"):
        read_measured(whole)


@pytest.mark.parametrize("name", NAMES[:4])
@pytest.mark.parametrize("part", ["base_config", "encoding"])
def test_files_of_another_config_or_encoding_are_refused(whole: Path, name: str, part: str) -> None:
    """Trees and statistics of another encoding have a note where they are used."""
    if part == "encoding" and name in NAMES[:2]:
        pytest.skip("it has a note where it is used")
    other = {"base_config": {"rope_parameters": {"rope_theta": 7.0}}, "encoding": "1:x:y"}[part]
    path = whole / name
    if name == "statistics.npz":
        found = RankStatistics.load(path)
        replace(found, meta={**found.meta, part: other}).save(path)
    elif name == "verify.json":
        greedy = json.loads(path.read_text())["greedy"]
        change(path, greedy={**greedy, part: other})
    else:
        change(path, **{part: other})
    what = "config of the base" if part == "base_config" else "encoding of text"
    with pytest.raises(ConfigError, match=rf"{name} was m\w+ with another {what}"):
        read_measured(whole)


def test_statistics_that_the_tree_was_not_found_from_are_refused(whole: Path) -> None:
    found = RankStatistics.load(whole / "statistics.npz")
    fewer, _ = found.split(0.5, seed=1)
    fewer.save(whole / "statistics.npz")
    with pytest.raises(ConfigError, match="was found from other statistics"):
        read_measured(whole)


def test_speeds_with_another_tree_are_refused(whole: Path) -> None:
    for name in ("statistics.npz", "verify.json"):
        (whole / name).unlink()
    (whole / "tree.json").write_text("[[0], [0, 0]]")
    with pytest.raises(ConfigError, match=r"bench.json was measured with another tree"):
        read_measured(whole)
    (whole / "tree.json").unlink()  # the chain of all heads is in use then
    with pytest.raises(ConfigError, match="another tree"):
        read_measured(whole)


def test_files_of_earlier_versions_have_a_line_each(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_measured(folder).replayed is not None
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("does not say with which heads") == said.count("with which tree") == 2
    for name in ("tree.json", "statistics.npz", "bench.json", "verify.json"):
        assert said.count(f"{name} does not say") == 1
