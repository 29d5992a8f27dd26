"""What an earlier version wrote (write.py) is read, with equal results; what no longer exists is
refused in words.

Shapes: X rows, D hidden, J tokens of a path.
"""

import contextlib
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.typed import typed_command

import medusa_kit
from medusa_kit.base.loading import load_base_model
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import MedusaKitError
from medusa_kit.heads import load_heads
from medusa_kit.heads.order import best_columns
from medusa_kit.hub.card import CardOptions, render_card
from medusa_kit.hub.measured import read_measured
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.quick import search, settings
from medusa_kit.quick.run import prepared, run
from medusa_kit.quick.session import Request
from medusa_kit.quick.state import PHASES
from medusa_kit.settings.engine_file import read_engine_file
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.trainer import train
from medusa_kit.tree.statistics import RankStatistics
from medusa_kit.tuning.tree_search import search_tree

WRITTEN = Path(__file__).parent / "written"
KINDS = ("medusa", "hydra", "recurrent")
MAY_GO = {"rooted": "rooted", "prefixed": "prefix"}  # with the word that a refusal has
PACKED = "packing base, once on this machine"
needs_kernels = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, as if it had been written there; the working folder."""
    folder = tmp_path / "files"
    shutil.copytree(WRITTEN, folder)
    for path in filter(Path.is_file, folder.rglob("*")):
        with contextlib.suppress(UnicodeDecodeError):
            text = path.read_text(encoding="utf-8").replace("@HERE@", str(folder.resolve()))
            path.write_text(text.replace("@MACHINE@", platform.node()), encoding="utf-8")
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(folder / "cache"))
    monkeypatch.setitem(sys.modules, "medusa_kit.tuning.plots", None)  # takes a second
    monkeypatch.chdir(folder)
    return folder


def recorded(path: str) -> Any:
    return json.loads(Path(path).read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def read_or_refused(word: str) -> Iterator[None]:
    """Raised is at most an error that names the thing and says what to do."""
    refused = None
    try:
        yield
    except MedusaKitError as error:
        refused = error
    if refused is not None:
        assert word in refused.message
        assert refused.hint


def engine_with(name: str) -> Engine:
    return medusa_kit.load("base", heads=f"heads/{name}", drafter="medusa", guesses="all",
                           dtype="float32", device="cpu")  # fmt: skip


def hold_answers(engine: Engine, name: str) -> None:
    expected, prompts = recorded("answers.json")[name], Path("prompts.txt").read_text().split("\n")
    asked = prompts[: len(expected["greedy"])]
    greedy = engine.generate(asked, max_new_tokens=24, batch_size=1)
    assert [result.token_ids for result in greedy] == expected["greedy"]
    # A static tree's nodes are those of its file; C++ drafts with rounded heads, torch does not.
    if name == "medusa" and engine.steps_run_by.startswith("C++"):
        assert [result.stats.num_steps for result in greedy] == expected["steps"]
    drawn = {key: expected["sampled"][key] for key in ("seed", "temperature")}
    for prompt, tokens in zip(asked, expected["sampled"]["tokens"], strict=True):
        assert engine.generate(prompt, max_new_tokens=24, **drawn).token_ids == tokens


def hold_guesses(name: str) -> None:
    """The four likeliest tokens of each head after drawn hidden states and paths."""
    base = load_base_model("base", dtype="float32", device="cpu")
    heads, expected = load_heads(Path("heads", name), base), recorded("answers.json")[name]
    generator = torch.Generator().manual_seed(expected["guesses"]["seed"])
    width = base.info.hidden_size * (2 if name == "prefixed" else 1)
    hidden_XD = torch.randn(3, width, generator=generator)
    path_XJ = torch.randint(4, 260, (3, heads.num_heads), generator=generator)
    with torch.no_grad():
        found = [
            heads.to_ids(best_columns(heads.project(z_XD, k), 4)).tolist()
            for k, z_XD in enumerate(heads.transforms(hidden_XD, path_XJ))
        ]
    assert found == expected["guesses"]["tokens"]


@pytest.mark.parametrize("name", KINDS)
def test_heads_guess_and_answer_as_they_did(name: str) -> None:
    hold_answers(engine_with(name), name)
    hold_guesses(name)


@pytest.mark.parametrize("name", MAY_GO)
def test_heads_that_may_go_do_so_too_or_are_refused(name: str) -> None:
    with read_or_refused(MAY_GO[name]):
        hold_answers(engine_with(name), name)
    with read_or_refused(MAY_GO[name]):
        hold_guesses(name)


@pytest.mark.parametrize("change", [
    "heads.kind=rooted", "heads.prefix_layers=1", "train.loss=tv", "train.head_weights=learned",
    "train.fused_loss=liger",
])  # fmt: skip
def test_options_that_may_go_are_read_or_refused(change: str) -> None:
    with read_or_refused(change.split(".")[1].split("=")[0]):
        load_recipe(Path("stopped/recipe.yaml"), [change])


def test_an_engine_file_loads() -> None:
    hold_answers(medusa_kit.load_config("engine.yaml"), "medusa")
    assert read_engine_file("engine.yaml").serve == {"max_rows": 4}


def test_a_stopped_run_goes_on_with_the_features_that_it_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shards, index = contents(Path("features")), recorded("features/index.json")
    train(load_recipe(Path("stopped.yaml")))
    said = capsys.readouterr().err
    assert "continuing from update 7 of " in said
    assert "hidden states on disk: 0 of " in said
    found, whole = (
        [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        for run in ("stopped", "whole")
    )
    assert [line["step"] for line in found] == [line["step"] for line in whole]
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (found, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    # The earlier version finds what it left, if it runs beside this one.
    now = recorded("features/index.json")
    assert {key: now.get(key, False) for key in index} == index
    left = contents(Path("features"))
    assert {path: left[path] for path in shards if path.endswith(".safetensors")} == {
        path: one for path, one in shards.items() if path.endswith(".safetensors")
    }


def test_quick_resumes_where_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(settings, "CPU_POSITIONS", 48)
    monkeypatch.setattr(search, "CHOICES", (((1, 2, 4), False),))
    monkeypatch.setattr(search, "REPORTED", (2, 4))
    before, answers = recorded("quick/quick.json")["phases"], Path("quick/answers.jsonl")
    rows = answers.read_bytes()
    session = prepared(
        Request("base", "prompts.txt", 0.01, Path("quick"), "cpu", clock=lambda: 0.0)
    )
    run(session)
    said = capsys.readouterr().err
    assert "resuming after " in said
    assert "continuing from update 3 of " in said
    assert "hidden states on disk: 0 of " in said
    assert answers.read_bytes() == rows
    assert all(session.state.done(name) for name in PHASES)
    for name in PHASES[:2]:
        assert before[name]["done"]
        assert session.state.figures(name) == before[name]["figures"]


def test_finished_answers_are_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("answers.jsonl").read_bytes()
    generate = typed_command(monkeypatch, capsys, "data", "generate", "-m", "base", "prompts.txt")
    code, _, said = generate("-o", "answers.jsonl", "-n", 24)
    assert (code, Path("answers.jsonl").read_bytes()) == (0, before)
    assert "16 were there already" in said


@pytest.mark.parametrize("name", ["medusa", "recurrent"])
def test_the_card_and_the_tree_search_read_what_was_measured(name: str) -> None:
    folder = Path("heads", name)
    tree, measured = recorded(f"heads/{name}/tree.json"), read_measured(folder)
    assert measured.plan is not None
    assert measured.replayed is not None
    assert measured.plan.for_batch(1).num_nodes == 8
    length = tree["acceptance_length"]
    assert measured.replayed.result.acceptance_length == pytest.approx(length, abs=1e-4)
    card = render_card(measured, CardOptions("me/heads", base_model="me/base"))
    assert f"{length:.3f}" in card
    if name == "medusa":
        bench, verify = recorded("heads/medusa/bench.json"), recorded("heads/medusa/verify.json")
        (written,) = (report.to_json() for report in measured.benches)
        kinds = [(one.pop("kind"), one.pop("drafter")) for one in written["methods"]]
        assert written == bench
        assert kinds == [("transformers", None), ("peer", None), ("ours", "none"), ("ours", None)]
        assert {how: part.to_json() for how, part in measured.verify.items()} == verify
    statistics = RankStatistics.load(folder / "statistics.npz")
    found = search_tree(engine_with(name), statistics, (1, 4, 8), 8, (1, 4))
    rows = [row.as_dict() for row in found.rows]
    timed = ("step_ms", "predicted_speed_up")
    assert [{key: row[key] for key in row if key not in timed} for row in rows] == [
        {key: row[key] for key in row if key not in timed} for row in tree["table"]
    ]


def packed_folder() -> Path:
    return next(Path("cache/packed").glob("base-*"))


@needs_kernels
def test_packed_weights_are_adopted(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    folder = packed_folder()
    before, made_with = contents(folder), f"transformers {version('transformers')}".encode()
    same = made_with in (folder / "weights.packed").read_bytes()  # which says what a config means
    engine_with("medusa")
    assert (PACKED in capsys.readouterr().err) == (not same)
    assert not same or contents(folder) == before


@needs_kernels
def test_packed_weights_go_with_their_contents_and_others_stay(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a version that names them otherwise, and those of another machine."""
    folder = packed_folder()
    beside, elsewhere = folder.with_name("base-named-otherwise"), folder.with_name("base-elsewhere")
    for place in (beside, elsewhere):
        shutil.copytree(folder, place)
    (beside / "weights.packed").write_bytes(b"another layout")
    record = json.loads((folder / "made_from.json").read_text())
    record["place"][0] = "another machine"
    (elsewhere / "made_from.json").write_text(json.dumps(record))
    kept = [contents(place) for place in (beside, elsewhere)]
    shutil.rmtree(folder)
    engine_with("medusa")
    assert PACKED in capsys.readouterr().err
    assert [contents(place) for place in (beside, elsewhere)] == kept
    weights = load_file(files / "base/model.safetensors")
    changed = {name: 0.5 * tensor for name, tensor in weights.items()}
    save_file(changed, files / "base/model.safetensors", metadata={"format": "pt"})
    medusa_kit.load("base", heads=None, device="cpu")
    assert not folder.exists()
    assert contents(elsewhere) == kept[1]
