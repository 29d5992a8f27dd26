"""`train --quick --from FILE`: trains on answers that are there already."""

import json
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quick_runs import Clock, Whole, note_phases
from support.typed import typed_command

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.origin import BASE
from medusa_kit.cli.quick import run_quick
from medusa_kit.data.answer_settings import read_settings, rows_of, settings_path, write_settings
from medusa_kit.data.readers import AnswerRow, read_rows
from medusa_kit.distill.generate import generate_answers
from medusa_kit.errors import ConfigError, DataError
from medusa_kit.heads.checkpoint import read_config
from medusa_kit.quick import report, search, text
from medusa_kit.quick import run as quick_run
from medusa_kit.quick import session as quick_session
from medusa_kit.quick.answered import keep_copy, read_answered, take
from medusa_kit.quick.answers import read_answers
from medusa_kit.quick.session import Request, Session
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.tuning import calibrate

PROMPTS = 30


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"Count from {i} to {i * i}.\n" for i in range(PROMPTS)))
    path = folder / "served.jsonl"
    base = load_base_model("debug-tiny", device="cpu")
    generate_answers(base, read_rows(str(prompts)), path, max_new_tokens=12)
    return path


@pytest.fixture
def file(answers: Path, tmp_path: Path) -> Path:
    """A copy that tests may change."""
    path = tmp_path / answers.name
    shutil.copy(answers, path)
    shutil.copy(settings_path(answers), settings_path(path))
    return path


@pytest.fixture
def request_from(file: Path, tmp_path: Path, clock: Clock) -> Callable[..., Request]:
    def build(**changes: Any) -> Request:
        request = Request("debug-tiny", str(file), 0.01, tmp_path / "heads", "cpu", clock=clock,
                          answered=True)  # fmt: skip
        return replace(request, **changes)

    return build


def rows_in(path: Path) -> list[AnswerRow]:
    return [row for row in read_rows(str(path)) if isinstance(row, AnswerRow)]


def texts(rows: list[Any]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(tuple(row.prompt_ids), tuple(row.response_ids)) for row in rows}


def test_heads_come_of_the_answers_that_are_there(
    request_from: Callable[..., Request], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any) -> None:
        raise AssertionError("nothing is left to answer")

    monkeypatch.setattr(text, "answer", nothing)
    session = quick_run.prepared(request_from())
    verified = quick_run.run(session)
    assert verified["bugs"] == 0
    trained, held_out = texts(rows_in(session.answers)), texts(rows_in(session.held_out))
    tested = texts(session.prompts.test)
    assert trained | held_out | tested == texts(rows_in(file))
    assert len(trained) + len(held_out) + len(tested) == PROMPTS  # each in one of them
    for path in (session.answers, session.held_out):
        assert not rows_of(str(path)).doubtful
    assert (session.heads / "heads.safetensors").is_file()


def test_copies_of_what_people_asked_are_as_private_as_the_record(
    request_from: Callable[..., Request], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.chmod(0o600)
    session = quick_run.prepared(request_from())
    monkeypatch.setattr(quick_run, "run_training", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        quick_run.run(session)
    for copy in (session.copy, session.answers, session.held_out):
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600, copy


@pytest.mark.parametrize("end", ["whole", "no newline", "cut", "damaged before"])
def test_a_last_row_that_a_stopped_server_cut_off_is_left_out(
    request_from: Callable[..., Request], file: Path, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    cut = lines[-1][:40]
    kept = {"whole": whole, "no newline": whole.rstrip(), "cut": b"".join(lines[:-1]) + cut,
            "damaged before": b"".join([*lines[:-2], cut, b"\n", lines[-1]])}  # fmt: skip
    file.write_bytes(kept[end])
    if end == "damaged before":
        with pytest.raises(DataError, match=rf"{file.name}:{PROMPTS - 1} is not JSON"):
            quick_run.prepared(request_from())
        return
    session = quick_run.prepared(request_from())
    quick_run.show_plan(session)
    left_out = f"1 rows of {file} are no prompts and are left out (row {PROMPTS}: it is cut off"
    assert (left_out in capsys.readouterr().err) == (end == "cut")
    keep_copy(str(file), session.copy)
    num_rows = PROMPTS - (end == "cut")
    assert session.copy.read_bytes() == b"".join(lines[:num_rows])
    take(session.copy, session.prompts.training, session.answers)
    assert texts(rows_in(session.answers)) == texts(session.prompts.training)


def test_turns_of_a_conversation_are_held_out_together(tmp_path: Path) -> None:
    """A later turn's prompt holds the earlier turns' answers, on which trees would be found."""
    path, turns = tmp_path / "served.jsonl", 4
    rows = []
    for chat in range(30):
        ids = [1, 100 + chat]
        for turn in range(turns):
            answer = [200 + chat, turn, 2]
            rows.append({"prompt_ids": ids, "response_ids": answer, "finish_reason": "stop"})
            ids = [*ids, *answer, 1, 300 + turn]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_settings(path, {"served": True})
    prompts = read_answered(path, path.name)
    sides = [{row.prompt_ids[1] for row in side if isinstance(row, AnswerRow)}
             for side in (prompts.training, [*prompts.calibration, *prompts.test])]  # fmt: skip
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 4  # sixteen rows, eight to measure on
    assert len(prompts.training) == 26 * turns


@pytest.mark.slow
def test_it_goes_on_from_the_heads_that_served(
    request_from: Callable[..., Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of an earlier run, or those found for the model; for another engine from none."""
    session = quick_run.prepared(request_from())
    assert session.earlier is None  # none are found for the debug model
    quick_run.run(session)
    again = quick_run.prepared(request_from(output=tmp_path / "more", earlier=session.heads))
    quick_run.run(again)
    first, recipe = load_recipe(session.recipe), load_recipe(again.recipe)
    assert first.train.heads_from is None
    assert recipe.train.heads_from == str(session.heads)
    assert recipe.train.learning_rate < first.train.learning_rate
    assert recipe.heads.num_heads == first.heads.num_heads
    assert read_config(again.heads).kind == read_config(session.heads).kind
    before, now = (one.state.figures("search") for one in (session, again))
    assert before["static_before"] == {}
    monkeypatch.setattr(search, "find_heads", lambda base, heads: session.heads)
    answers = calibrate.usable_answers(session.base, read_answers(session.held_out))
    of_these = search._lengths_before(session, answers[: before["calibration_answers"]])
    assert of_these == before["static"]
    assert now["static_before"].keys() == now["static"].keys()
    rows = dict(report.rows_of(report.record_of(again)))
    assert f"4: {now['static_before']['4']:.2f}" in rows["the same of the heads that were there"]
    monkeypatch.setattr(quick_session, "find_heads", lambda base, heads: session.heads)
    assert quick_run.prepared(request_from(output=tmp_path / "a")).earlier == session.heads
    other = request_from(output=tmp_path / "b", engine="vllm")
    assert quick_run.prepared(other).earlier is None


def test_heads_that_were_there_and_cannot_be_used_end_no_run(
    whole: Whole,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session, folder = whole.session, tmp_path / "heads"
    monkeypatch.setattr(search, "find_heads", lambda *_: folder)
    answers = calibrate.usable_answers(session.base, read_answers(session.held_out))
    cut = {"heads.safetensors": b"cut off", "config.json": b'{"format": "medusa-kit-heads"}'}
    for name, damage in cut.items():
        shutil.copytree(session.heads, folder, dirs_exist_ok=True)
        assert search._lengths_before(session, answers) == session.state.figures("search")["static"]
        (folder / name).write_bytes(damage)
        assert search._lengths_before(session, answers) == {}
        assert "the heads that were there cannot be compared with: " in capsys.readouterr().err


def test_an_earlier_run_goes_on_with_what_it_kept_out(
    request_from: Callable[..., Request],
) -> None:
    request = request_from()
    session = quick_run.prepared(request)
    session.state.open(fresh=False)
    assert quick_run.prepared(request).prompts == session.prompts
    record = json.loads(session.state.path.read_text())
    assert record["settings"].pop("least_tested") == 8
    session.state.path.write_text(json.dumps(record))
    earlier = quick_run.prepared(request).prompts
    assert (len(earlier.calibration), len(earlier.test)) == (3, 1)
    assert len(session.prompts.test) > 1
    assert quick_run.prepared(request, fresh=True).prompts == session.prompts


def test_heads_that_were_as_good_before_are_to_be_kept() -> None:
    def row(now: float, before: float) -> str:
        search = {"static": {"4": now}, "static_before": {"4": before}}
        return dict(report.lengths_before(search))["the same of the heads that were there"]

    assert row(1.6, 1.5) == "4: 1.50"
    assert "keep them" in row(1.5, 1.5)
    assert report.lengths_before({"static": {"4": 1.5}}) == []  # as earlier versions left it


def test_the_command_finds_the_heads_of_its_own_earlier_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path
) -> None:
    requests = list[Request]()

    def noted(request: Request, fresh: bool) -> Session:
        requests.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(quick_run, "prepared", noted)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_quick([], "debug-tiny", None, 1.0, None, "cpu", False, answers=file)
        heads = Path("heads-debug-tiny/run/heads")
        heads.mkdir(parents=True, exist_ok=True)
        (heads / "config.json").write_text("{}")
    assert [request.earlier for request in requests] == [None, heads]
    assert {str(request.output) for request in requests} == {"heads-debug-tiny-served"}


@pytest.mark.slow
def test_a_server_may_write_on(
    request_from: Callable[..., Request], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on works with what was there when it began."""
    session = quick_run.prepared(request_from())
    with monkeypatch.context() as patch:
        patch.setattr(quick_run, "run_training", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            quick_run.run(session)
    before = session.prompts
    lines = file.read_text().splitlines(keepends=True)
    row = json.loads(lines[0])
    more = {**row, "id": "more", "prompt_ids": [*row["prompt_ids"], 7]}
    more.pop("origin")
    file.write_text("".join([*lines, json.dumps(more) + "\n"]))
    begun = note_phases(monkeypatch)
    again = quick_run.prepared(request_from())
    assert again.prompts == before
    quick_run.run(again)
    assert begun[0] == "training"
    fresh = quick_run.prepared(request_from(), fresh=True)
    divided = (fresh.prompts.training, fresh.prompts.calibration, fresh.prompts.test)
    assert sum(map(len, divided)) == PROMPTS + 1


def test_a_row_that_comes_while_a_run_begins_is_part_of_it(
    request_from: Callable[..., Request], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = quick_run.prepared(request_from())
    row = json.loads(file.read_text().splitlines()[0])
    more = {**row, "id": "more", "prompt_ids": [*row["prompt_ids"], 7]}
    more.pop("origin")
    with file.open("a") as stream:
        stream.write(json.dumps(more) + "\n")
    monkeypatch.setattr(quick_run, "run_training", _interrupted)
    for _ in range(2):  # it resumes
        with pytest.raises(KeyboardInterrupt):
            quick_run.run(session)
        session = quick_run.prepared(request_from())
    divided = (session.prompts.training, session.prompts.calibration, session.prompts.test)
    assert sum(map(len, divided)) == PROMPTS + 1


def test_the_model_must_be_the_one_that_answered(
    request_from: Callable[..., Request], file: Path
) -> None:
    settings = read_settings(file)
    assert settings is not None
    write_settings(file, {**settings, BASE: settings[BASE][:-4] + "0000"})
    with pytest.raises(ConfigError, match="answers of another model"):
        quick_run.run(quick_run.prepared(request_from()))


def test_other_files_are_refused_before_a_model_is_loaded(
    request_from: Callable[..., Request], file: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="is no file"):
        quick_run.prepared(request_from(prompts=str(tmp_path / "nowhere.jsonl")))
    few = "".join(file.read_text().splitlines(keepends=True)[:5])
    file.write_text(few)
    with pytest.raises(DataError, match="answers to 5 different prompts"):
        quick_run.prepared(request_from())
    settings_path(file).unlink()
    with pytest.raises(ConfigError, match="says which model answered"):
        quick_run.prepared(request_from())
    assert not (tmp_path / "heads").exists()


def test_one_of_prompts_and_answers_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = typed_command(monkeypatch, capsys, "train")
    code, _, err = run("--quick", "-m", "debug-tiny", "--prompts", "a.txt", "--from", "b.jsonl")
    assert (code, "--prompts does not go with --from" in err) == (2, True)
    code, _, err = run("--quick", "-m", "debug-tiny")
    assert (code, "--from" in err) == (2, True)
    code, _, err = run("recipe.yaml", "--from", "b.jsonl")
    assert (code, "only --quick takes --from" in err) == (2, True)


def _interrupted(_: Session) -> dict[str, Any]:
    raise KeyboardInterrupt
