"""Whole quick runs on the debug model: from prompts to a report, stopped anywhere, refused."""

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quick_runs import Whole, note_phases
from safetensors.torch import load_file
from support.debug_model import small_tokenizer
from support.tiny_models import model_of, tiny_model

from medusa_kit import console, files
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, DataError, MedusaKitError
from medusa_kit.hub.measured import read_measured
from medusa_kit.quick import judging, plan, report, search, text, trial
from medusa_kit.quick import run as quick_run
from medusa_kit.quick.run import prepared, run
from medusa_kit.quick.session import Request
from medusa_kit.quick.state import PHASES
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.loop import TrainingLoop

Build = Callable[..., Request]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of phases, as they begin."""
    return note_phases(monkeypatch)


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_a_run_stopped_in_every_phase_ends_as_one_that_was_not(
    request_for: Build, whole: Whole, begun: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert whole.begun == list(PHASES)

    updates, original = [0], TrainingLoop._update

    def stopped_at_three(self: TrainingLoop, update: Any) -> None:
        original(self, update)
        updates[0] += 1
        if updates[0] == 3:
            signal.raise_signal(signal.SIGINT)

    stops = {
        "held_out": (trial, "measure", interrupted),
        "answers": (text, "replace", interrupted),
        "training": (TrainingLoop, "_update", stopped_at_three),
        "search": (search, "search_tree", interrupted),
        "verify": (judging, "verify", interrupted),
        "bench": (judging, "bench", interrupted),
    }
    parts = request_for("parts")
    for name, (place, attribute, stop) in stops.items():
        begun.clear()
        session = prepared(parts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, attribute, stop)
            with pytest.raises(KeyboardInterrupt):
                run(session)
        index = PHASES.index(name)
        assert begun == list(PHASES[max(0, index - 1) : index + 1])
    assert "continuing from update 3 of " in capsys.readouterr().err
    begun.clear()
    session = prepared(parts)
    run(session)
    assert begun == ["bench"]

    for name in ("answers.jsonl", "held_out.jsonl"):
        assert (session.path(name)).read_text() == whole.session.path(name).read_text()
    both = (session, whole.session)
    ours, theirs = (load_file(one.heads / "heads.safetensors") for one in both)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    found, expected = (one.state.figures("search") for one in both)
    assert found["static"] == expected["static"]
    begun.clear()
    run(prepared(parts))
    assert begun == []


def test_what_a_run_leaves(whole: Whole) -> None:
    session = whole.session
    title, lines, commands = report.write(session)
    folder = session.request.output
    asked = {row["id"] for row in rows(folder / "answers.jsonl")}
    held = {row["id"] for row in rows(folder / "held_out.jsonl")}
    assert (len(asked), len(held), asked & held) == (23, 4, set())
    assert whole.verified["bugs"] == 0

    measured = read_measured(folder / "run" / "heads")  # as push reads them
    assert measured.tree is not None
    assert measured.replayed is not None
    assert measured.verify
    assert len(measured.benches) == 1
    recipe = load_recipe(folder / "recipe.yaml")
    assert recipe.train.epochs == 5
    assert recipe.heads.projection == "shared"
    assert recipe.data.sources == [str(folder / "answers.jsonl")]

    record = json.loads((folder / "report.json").read_text())
    assert set(record["phases"]) == set(PHASES)
    assert set(record["phases"]["search"]["static"]) == {"2", "4"}
    assert record["phases"]["training"]["positions"] > 0
    table = dict(lines)
    assert title == "heads for debug-tiny"
    assert "answers identical" in table["verify"]
    assert "× plain decoding" in table["measured: auto, the default"]
    assert str(folder / "run" / "heads") in commands[0][0]
    assert table["text"] in (folder / "report.md").read_text()
    record["phases"]["search"]["chosen"]["nodes"] = 1
    assert dict(report.rows_of(record))["chosen tree"] == "none gains on this machine"
    assert len(record["phases"]["search"].pop("chain")["acceptance_by_depth"]) == 2
    assert dict(report.rows_of(record)).keys() == table.keys()  # records of earlier versions


def test_a_report_says_what_its_gain_was_measured_on(whole: Whole) -> None:
    record = report.record_of(whole.session)
    speeds = record["phases"]["bench"]
    table = dict(report.rows_of(record))
    assert table["measured on"].startswith(f"{console.counted(speeds['prompts'], 'prompt')}, at ")
    assert "is chance" in table["measured on"]
    speeds |= {"prompts": 9, "loops": 2}
    assert "9 prompts, at most" in (said := dict(report.rows_of(record))["measured on"])
    assert said.endswith("2 with answers that end in a loop are left out")
    speeds |= {"prompts": 1, "loops": 1}
    table = dict(report.rows_of(record))
    assert table["measured on"].startswith("1 prompt, and its answer is a loop")
    assert "×" not in table["measured: auto, the default"]
    record["phases"]["answers"]["loops"] = 3
    assert "23 answers (3 end in a loop), " in dict(report.rows_of(record))["text"]


def test_looping_answers_to_train_on_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = SimpleNamespace(answers=tmp_path / "answers.jsonl")
    row = {"id": "1", "prompt_ids": [1], "response_ids": [5] * 40, "finish_reason": "length"}
    session.answers.write_text(f"{json.dumps(row)}\n")
    assert text._count_loops(session) == 1  # type: ignore[arg-type]
    assert "warning: 1 of 1 answers to train on" in capsys.readouterr().err


def test_without_room_for_a_second_model_the_rest_is_measured(
    request_for: Build, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(base: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(judging, "oracle_beside", no_room)
    whole.copied(tmp_path / "heads")
    path = tmp_path / "heads/quick.json"
    record = json.loads(path.read_text())
    for name in ("verify", "bench"):
        del record["phases"][name]
    path.write_text(json.dumps(record))
    session = prepared(request_for())
    found = run(session)
    assert found == {"not_run": "the device has no room for a second model"}
    _, lines, _ = report.write(session)
    names = [name for name, _ in lines if name.startswith("measured: ")]
    assert names == [
        "measured: plain decoding",
        "measured: heads alone",
        "measured: auto, the default",
    ]
    assert dict(lines)["verify"] == "not run: the device has no room for a second model"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_a_folder_without_a_chat_template(request_for: Build, tmp_path: Path, family: str) -> None:
    """Of a base model; GPT-2's steps run through torch, Qwen's in C++."""
    tokenizer = small_tokenizer("{{ '' }}")
    tokenizer.chat_template = None
    make = model_of if family == "qwen2" else tiny_model
    model = make(family, vocab_size=len(tokenizer), pad_token_id=None, bos_token_id=None)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "base")
    path = tmp_path / "prompts.jsonl"  # without a template, no text is no token
    prompts = ["", *(f"Count from {i} to {i * i}." for i in range(29))]
    path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    session = prepared(request_for(model=str(tmp_path / "base"), prompts=str(path)))
    rows_ = [*session.prompts.training, *session.prompts.calibration]
    assert "" in [row.messages[0]["content"] for row in rows_]
    assert run(session)["bugs"] == 0
    first = rows(session.answers)[0]["prompt_ids"]
    assert tokenizer.decode(first).startswith("Count from ")
    assert session.base.is_light == (family == "qwen2")


def test_what_would_mix_two_runs_is_refused(
    request_for: Build, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(prepared(request_for()))
    with pytest.raises(ConfigError, match=r"hours 0.005 ≠ 0.01"):
        prepared(request_for(hours=0.005))
    with pytest.raises(ConfigError, match="model 'smollm2-135m-instruct' ≠ 'debug-tiny'"):
        prepared(request_for(model="smollm2-135m-instruct"))
    prompt_file.write_text(prompt_file.read_text() + "One more?\n")
    with pytest.raises(ConfigError, match=r"prompts '\w+' ≠ '\w+'.*") as refused:
        prepared(request_for())
    assert "--fresh" in str(refused.value)
    prepared(request_for(), fresh=True)
    assert (tmp_path / "heads/held_out.jsonl").is_file()  # nothing is removed by looking

    record = json.loads((tmp_path / "heads/quick.json").read_text())
    record["notes"]["base"] = "v2:0:0"
    prompt_file.write_text(prompt_file.read_text().removesuffix("One more?\n"))
    (tmp_path / "heads/quick.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="is another model than the one that this run began"):
        run(prepared(request_for()))

    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match=r"holds other files \(thesis.txt\)"):
            prepared(request_for("other"), fresh)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        prepared(request_for("file"))
    with pytest.raises(DataError):
        prepared(request_for("new", prompts=str(tmp_path / "nowhere.jsonl")))
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_more_hours_give_more_answers_and_new_heads(
    request_for: Build, whole: Whole, begun: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    whole.copied(tmp_path / "heads")
    first = prepared(request_for())
    heads = (first.heads / "heads.safetensors").read_bytes()
    answers = first.answers.read_text()
    record = json.loads(first.state.path.read_text()) | {"seconds": 30.0}
    for name, seconds in (("answers", 9.0), ("training", 10.0), ("bench", 3.0)):
        record["phases"][name]["seconds"] = seconds
    first.state.path.write_text(json.dumps(record))
    longer = prepared(request_for(hours=0.02))
    assert (first.heads / "heads.safetensors").is_file()  # nothing is changed by looking
    run(longer)
    assert begun == list(PHASES[1:])
    assert longer.state.seconds() == pytest.approx(17.0)  # without what ran anew
    assert longer.state.phase_seconds("answers") == 9.0
    assert longer.answers.read_text().startswith(answers)
    kept = longer.path("run-0.01h") / "heads" / "heads.safetensors"
    assert kept.read_bytes() == heads
    assert (longer.heads / "heads.safetensors").is_file()
    said = capsys.readouterr().err
    assert f"the heads of 0.01 hours are kept in {kept.parents[1]}" in said
    last = said[said.rindex("heads of kind") :]  # the second run's, which begins with this line
    assert "more time than before" in last
    begun.clear()
    run(prepared(request_for(hours=0.02)))
    assert begun == []
    with pytest.raises(ConfigError, match=r"hours 0.01 ≠ 0.02") as refused:
        prepared(request_for())
    assert "only a larger --hours resumes" in str(refused.value)
    mine = longer.path("run-bench")
    mine.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(prepared(request_for(), fresh=True), fresh=True)
    assert not kept.exists()
    assert mine.is_dir()


def test_a_finished_run_is_told_from_a_folder_that_cannot_be_written(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = whole.session
    told = report.write(session)

    def read_only(*_: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(quick_run, "only_training_in", read_only)
    monkeypatch.setattr(files, "atomic_write", read_only)
    again = prepared(session.request)
    assert run(again) == session.state.figures("verify")
    assert [line for line in report.write(again)[1] if line[0] != "disk"] == [
        line for line in told[1] if line[0] != "disk"
    ]


def test_what_to_type_next_names_the_device(request_for: Build) -> None:
    commands = [line for line, _ in report.next_commands(prepared(request_for()))]
    assert [line.endswith(" --device cpu") for line in commands] == [True, True, False]
    commands = [line for line, _ in report.next_commands(prepared(request_for(device="auto")))]
    assert not any("--device" in line for line in commands)


def test_fresh_starts_over_and_leaves_other_files(request_for: Build, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(prepared(request_for()))
        (folder / "notes.txt").write_text("mine")
        before = (folder / "held_out.jsonl").stat().st_mtime_ns
        request = request_for(hours=0.02)
        with pytest.raises(KeyboardInterrupt):
            run(prepared(request, fresh=True), fresh=True)
    assert (folder / "held_out.jsonl").stat().st_mtime_ns > before
    assert (folder / "notes.txt").read_text() == "mine"
    assert json.loads((folder / "quick.json").read_text())["settings"]["hours"] == 0.02


def test_time_spent_before_counts(
    request_for: Build, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time until Ctrl-C is written down; time until a kill is seen by the last file written."""

    def stop(*_: Any) -> Any:
        clock.now += 5.0
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "measure", stop)
    for spent in (5.0, 10.0):
        session = prepared(request_for())
        with pytest.raises(KeyboardInterrupt):
            run(session)
        assert session.state.seconds() == spent
        clock.now += 1000.0  # between two processes
    record = json.loads(session.state.path.read_text())
    assert (record["seconds"], record["running_since"]) == (10.0, None)
    began = time.time() + 1e6  # after all that was written in the meantime
    record["running_since"] = began
    session.state.path.write_text(json.dumps(record))
    os.utime(session.held_out, (began + 20.0, began + 20.0))
    session = prepared(request_for())
    session.state.open(fresh=False)
    assert session.state.seconds() == pytest.approx(30.0, abs=0.01)
    assert session.state.phase_seconds("held_out") == session.state.seconds()


def test_the_last_phases_share_what_training_left(request_for: Build, clock: Any) -> None:
    """Of 100 seconds they were to get 8, 4 and 8."""
    session = prepared(request_for(hours=100 / 3600))
    session.state.open(fresh=False)
    for now, expected in ((80.0, [8, 4, 8]), (90.0, [4, 2, 4]), (70.0, [12, 6, 12]),
                          (10.0, [16, 8, 16]), (200.0, [0, 0, 0])):  # fmt: skip
        clock.now = now
        assert [session.share(name) for name in plan.LAST] == pytest.approx(expected)
    clock.now = 92.0
    with session.state.phase("search"):
        pass
    assert session.share("verify") == pytest.approx(8 * 4 / 12)


def test_a_base_that_is_too_slow_is_refused_early(
    request_for: Build, clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens a second in the first trial, with half of the time gone for loading."""

    def slow(self: Any, prompts: Any, max_new_tokens: int, **_: Any) -> Any:
        clock.now += 18.0
        stats = SimpleNamespace(first_token_seconds=1.0, seconds=9.0)
        return [SimpleNamespace(token_ids=[1] * 9, stats=stats)] * len(prompts)

    many = tmp_path / "many.txt"
    many.write_text("".join(f"Count to {i}.\n" for i in range(1000)))
    session = prepared(request_for(prompts=str(many)))
    monkeypatch.setattr(Engine, "generate", slow)
    with pytest.raises(MedusaKitError, match=r"debug-tiny is too slow here for 0.01 h") as error:
        run(session)
    assert "about 864 training tokens would fit; heads need 2,000" in error.value.message
    assert "--hours 0.021 or more" in str(error.value)
    assert error.value.exit_code == 1
    assert not session.held_out.exists()


def test_answers_stop_when_their_time_is_over(
    request_for: Build, clock: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Each answer takes two seconds, where the trial promised half a second."""
    monkeypatch.setattr(text.settings, "ANSWER_BATCH", 4)
    session = prepared(request_for())
    rates = text.Rates(24.0, 1e6, 1e6, 1.5, 12.0)
    session.state.open(fresh=False)
    session.state.note("rates", rates.as_dict())
    original = text.answer.__globals__["generate_answers"]

    def timed(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        clock.now += 2.0 * found.written
        return found

    monkeypatch.setitem(text.answer.__globals__, "generate_answers", timed)
    monkeypatch.setattr(trial, "measure", lambda *_: rates)
    figures = text.run_answers(session)
    assert clock.now == pytest.approx(0.8 * 36.0, rel=0.15)
    assert figures["answers"] == clock.now / 2
    assert figures["answers"] < figures["prompts"]
    assert (
        "6 tokens/s answered and 1,000,000 training tokens/s now: about " in capsys.readouterr().err
    )
