"""Quick runs that go wrong: killed, a damaged record, prompts without room, no disk, no time."""

import json
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_kit.errors import CheckpointError, ConfigError, DataError, MedusaKitError
from medusa_kit.quick import run as quick_run
from medusa_kit.quick import text, trial
from medusa_kit.quick.run import prepared, run
from medusa_kit.quick.session import Request
from medusa_kit.quick.training import run_training
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.loop import TrainingLoop

Build = Callable[..., Request]


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("fresh", [False, True])
def test_a_persons_own_record_is_told_as_such_and_stays(request_for: Build, fresh: bool) -> None:
    request = request_for()
    request.output.mkdir(parents=True)
    own = request.output / "quick.json"
    own.write_text('{"my": "notes"}')
    with pytest.raises(ConfigError, match=r"quick.json is not that of a run") as refused:
        prepared(request, fresh=fresh)
    assert refused.value.hint == "name another folder with --output"
    assert own.read_text() == '{"my": "notes"}'


def test_the_time_between_a_kill_and_the_next_start_does_not_count(
    request_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock that the second process takes is a file, written only now."""
    monkeypatch.setattr(trial, "measure", interrupted)
    session = prepared(request_for())
    with pytest.raises(KeyboardInterrupt):
        run(session)
    killed = time.time() - 1e6
    record = json.loads(session.state.path.read_text()) | {"running_since": killed - 20.0}
    session.state.path.write_text(json.dumps(record))
    for path in session.request.output.iterdir():
        os.utime(path, (killed, killed))
    session = prepared(request_for())
    with pytest.raises(KeyboardInterrupt):
        run(session)
    assert session.state.seconds() == pytest.approx(20.0, abs=0.01)


@pytest.mark.parametrize(("changes", "where"), [
    ({"settings": None}, "settings"), ({"settings": ["model"]}, "settings"),
    ({"phases": []}, "phases"), ({"phases": {"answers": "done"}}, "phases.answers"),
    ({"phases": {"answers": {"done": True}}}, "phases.answers.seconds"),
    ({"notes": None}, "notes"), ({"seconds": "x"}, "seconds"), ({"seconds": -1.0}, "seconds"),
    ({"seconds": float("nan")}, "seconds"), ({"running_since": "x"}, "running_since"),
])  # fmt: skip
def test_a_damaged_record_is_refused(
    request_for: Build, changes: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = prepared(request_for())
    session.state.open(fresh=False)
    record = json.loads(session.state.path.read_text())
    session.state.path.write_text(json.dumps(record | changes))
    with pytest.raises(CheckpointError, match=rf"quick.json cannot be read: {where}: ") as refused:
        prepared(request_for())
    assert "--fresh" in str(refused.value)
    monkeypatch.setattr(quick_run, "run_held_out", interrupted)
    with pytest.raises(KeyboardInterrupt):  # it begins
        run(prepared(request_for(), fresh=True), fresh=True)


def test_rates_that_are_not_there_are_asked_for(request_for: Build) -> None:
    session = prepared(request_for())
    session.state.open(fresh=False)
    session.state.note("rates", {"answers": 1.0})
    with pytest.raises(CheckpointError, match="lacks rates that were measured"):
        text.run_answers(session)


LONG = "word " * 3000  # more than the debug model's context


def test_prompts_that_leave_no_room_are_left_out_wherever_they_are(
    request_for: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that come first, so that a first round would have nothing to answer."""
    session = prepared(request_for())
    for row in session.prompts.training[:17]:
        row.messages[0]["content"] = LONG
    session.state.open(fresh=False)
    more = iter([4, 4, 0])
    written = text.answer(
        session.base, session.prompts.training, session.answers, lambda _: next(more),
        session.clock,
    )  # fmt: skip
    assert (written.num_prompts, written.answers) == (6, 6)
    said = capsys.readouterr().err
    assert "17 prompts cannot be answered and are left out (row " in said
    assert "answers of 12 in a context of 1,024 leave room for 1,012" in said


@pytest.mark.parametrize(("count", "message"), [
    (30, r"none of 4 prompts can be answered, row \d+: it has [\d,]+ tokens"),
    (3, "1 of 4 held-out prompts gave an answer; the search for a tree needs 2 or more"),
])  # fmt: skip
def test_too_few_kept_out_answers_are_told_before_training(
    request_for: Build, monkeypatch: pytest.MonkeyPatch, count: int, message: str
) -> None:
    session = prepared(request_for())
    prompts = session.prompts
    for rows_ in (prompts.calibration[:count], prompts.training[:count]):
        for row in rows_:
            row.messages[0]["content"] = LONG
    monkeypatch.setattr(trial, "measure", lambda *_: pytest.fail("it goes on"))
    with pytest.raises(DataError, match=message):
        run(session)
    assert not session.state.done("held_out")


def test_a_disk_that_is_too_small_is_told_before_answers_are_written(
    request_for: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = prepared(request_for())
    session.state.open(fresh=False)
    session.state.note("rates", text.Rates(24.0, 1e6, 1e6, 1.5, 12.0).as_dict())
    monkeypatch.setattr(trial, "measure", lambda *_: session.rates)
    free = [10 << 20]
    monkeypatch.setattr(text.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    with pytest.raises(MedusaKitError, match=r"heads has 10 MB free; expected 67 or more") as error:
        text.run_answers(session)
    assert "run the same command again" in str(error.value)
    assert not session.answers.exists()
    each = 2 * session.base.info.hidden_size * 1.5
    monkeypatch.setattr(text, "MIN_POSITIONS", 0)
    free[0] = text.SPARE_DISK + int(60 * each)
    text.run_answers(session)
    said = capsys.readouterr().err
    assert (
        "the disk has room for the hidden states of 60 training tokens; there is time for " in said
    )


def test_no_time_at_all_is_told_in_hours_that_would_do(request_for: Build, clock: Any) -> None:
    """Loading took all of a second; 23 answers at 100 positions a second take little."""
    session = prepared(request_for(hours=1 / 3600))
    session.state.open(fresh=False)
    clock.now = 36.0
    with pytest.raises(MedusaKitError, match="about 0 training tokens would fit") as error:
        text.check_useful(session, 0.0, 100.0)
    assert "--hours 0.013 or more" in str(error.value)


def test_a_line_that_a_crash_cut_off_is_made_again(
    request_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "measure", interrupted)
    monkeypatch.setattr(text, "probe", lambda _: 1e6)  # tokens a second, however busy it is here
    session = prepared(request_for())
    with pytest.raises(KeyboardInterrupt):
        run(session)
    whole = session.held_out.read_bytes()
    session.held_out.write_bytes(whole[:-20])
    with pytest.raises(KeyboardInterrupt):
        run(prepared(request_for()))
    assert session.held_out.read_bytes() == whole


def test_a_folder_that_was_moved_goes_on_where_it_is(
    request_for: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, updates = TrainingLoop._update, [0]

    def stopped_at_three(self: TrainingLoop, update: Any) -> None:
        original(self, update)
        updates[0] += 1
        if updates[0] == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainingLoop, "_update", stopped_at_three)
    session = prepared(request_for())
    with pytest.raises(KeyboardInterrupt):
        run(session)
    there = session.request.output.rename(session.request.output.with_name("moved"))
    monkeypatch.setattr(quick_run, "run_search", interrupted)
    moved = prepared(request_for("moved"))
    with pytest.raises(KeyboardInterrupt):
        run(moved)
    assert "continuing from update 3 of " in capsys.readouterr().err
    assert (there / "run/heads/heads.safetensors").is_file()
    assert not session.request.output.exists()
    recipe = load_recipe(there / "recipe.yaml")
    assert recipe.data.sources == [str(there / "answers.jsonl")]
    assert recipe.train.cache_dir == str(there / "features")


def test_time_that_is_used_up_before_training_is_told(request_for: Build, clock: Any) -> None:
    """Of 36 seconds 29 are for answers and training, which would take 23 answers some 7."""
    session = prepared(request_for())
    session.state.open(fresh=False)
    rates = text.Rates(1e6, 1e6, 40.0, 1.5, 12.0)
    session.state.note("rates", rates.as_dict())
    text.run_answers(session)
    clock.now = 27.0
    with pytest.raises(MedusaKitError, match=r"2 s of 0.01 hours are left to train in") as error:
        run_training(session)
    assert "expected 7 s or more, and 7 s for all 27" in str(error.value)
    assert "--hours 0.012 or more" in str(error.value)
    assert not session.recipe.exists()


@pytest.mark.parametrize("left", ["{}", "[", "[]"])
def test_a_damaged_record_of_training_is_told(request_for: Build, left: str) -> None:
    session = prepared(request_for())
    session.run.mkdir(parents=True)
    (session.run / "run.json").write_text(left)
    with pytest.raises(CheckpointError, match="does not tell what was trained"):
        run_training(session)
