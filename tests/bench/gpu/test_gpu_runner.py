"""Runner and report: failures are recorded, the rest goes on, and no result is lost."""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import runner
from benchmarks.gpu.report import Report
from benchmarks.gpu.runner import DeviceLost, Part, run_parts
from benchmarks.gpu.workbench import Cannot, Workbench
from medusa_kit.errors import DataError, MedusaKitError

CPU = torch.device("cpu")
Run = Callable[[Workbench], Mapping[str, Any]]


class Killed(BaseException):
    """Ends the run as a signal would."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


def run(path: Path | None, *runs: Run, minutes: float = 5.0, goes_on: bool = False) -> Report:
    """Parts named a, b, … in turn."""
    parts = [Part(name, "steps", one) for name, one in zip("abcdef", runs, strict=False)]
    report = Report(CPU, True, path, goes_on=goes_on)
    run_parts(parts, Workbench(CPU, True, report.figures), report, minutes)
    return report


def fine(bench: Workbench) -> dict[str, Any]:
    return {"ms": 2.5}


def raises(error: BaseException) -> Run:
    def part(bench: Workbench) -> dict[str, Any]:
        raise error

    return part


def caused_by(cause: Exception) -> Exception:
    error = MedusaKitError("the self-check failed")
    error.__cause__ = cause
    return error


def statuses(report: Report) -> list[str]:
    return [record.status for record in report.records.values()]


@pytest.mark.parametrize(
    ("error", "status", "why"),
    [
        (ValueError("no such thing\nmore"), "failed", "ValueError: no such thing"),
        (ZeroDivisionError(), "failed", "ZeroDivisionError"),
        (MedusaKitError("the tokens differ", hint="look"), "failed", "the tokens differ"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory", "CUDA out of memory."),
        (caused_by(torch.OutOfMemoryError("no")), "out of memory", "the self-check failed"),
        (torch.OutOfMemoryError(), "out of memory", "OutOfMemoryError"),
        (Cannot("triton is not installed"), "cannot", "triton is not installed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_breaks_is_recorded_and_the_rest_goes_on(
    path: Path, error: Exception, status: str, why: str
) -> None:
    report = run(path, fine, raises(error), fine)
    assert statuses(report) == ["done", status, "done"]
    assert report.records["b"].why == why
    assert len(report.broken) == (status != "cannot")
    assert [part["status"] for part in json.loads(path.read_text())["parts"]] == statuses(report)


def test_a_failed_part_says_where() -> None:
    report = run(None, raises(ValueError("here")))
    assert "in part" in str(report.records["a"].where)


def test_the_report_is_saved_after_each_part(path: Path) -> None:
    seen = []

    def looks(bench: Workbench) -> dict[str, Any]:
        seen.append(json.loads(path.read_text()))
        return {}

    run(path, fine, looks)
    (told,) = seen
    assert [part["name"] for part in told["parts"]] == ["a"]
    assert told["parts"][0]["figures"] == {"ms": 2.5}
    assert told["running"] == "b"
    assert not told["finished"]


def test_a_killed_run_leaves_a_report_to_go_on_from(path: Path) -> None:
    with pytest.raises(Killed):
        run(path, fine, raises(Killed()), fine)
    before = json.loads(path.read_text())
    assert (before["running"], before["finished"]) == ("b", False)

    report = run(path, raises(Killed()), raises(Killed()), fine, goes_on=True)
    assert statuses(report) == ["done", "failed", "done"]
    assert report.records["b"].why == "the process ended while it ran"
    assert report.figures("a") == {"ms": 2.5}
    assert json.loads(path.read_text())["finished"]


def test_ctrl_c_blames_no_part(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(path, fine, raises(KeyboardInterrupt()))
    assert "running" not in json.loads(path.read_text())
    assert statuses(run(path, fine, fine, goes_on=True)) == ["done", "done"]


def test_going_on_needs_a_report_of_the_same_kind(path: Path) -> None:
    path.write_text("{}")
    with pytest.raises(DataError, match="not a report to continue") as raised:
        run(path, fine, goes_on=True)
    assert raised.value.hint == "leave out --continue"


def other_device(told: dict[str, Any]) -> None:
    told["setup"]["device"] = "NVIDIA H200"


def other_torch(told: dict[str, Any]) -> None:
    told["setup"]["torch"] = "1.0"


def no_figures(told: dict[str, Any]) -> None:
    told["parts"][0]["figures"] = None


def no_such_status(told: dict[str, Any]) -> None:
    told["parts"][0]["status"] = "well"


def one_field_more(told: dict[str, Any]) -> None:
    told["parts"][0]["colour"] = "red"


def a_number_runs(told: dict[str, Any]) -> None:
    told["running"] = 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_device, "its device is NVIDIA H200, but here device is"),
        (other_torch, "its torch is 1.0, but here torch is"),
        (no_figures, r"valid dictionary .parts.0.figures"),
        (no_such_status, r"parts.0.status"),
        (one_field_more, r"parts.0.colour"),
        (a_number_runs, "running is 5; expected the name of a part"),
    ],
)
def test_a_report_of_another_machine_or_form_is_not_gone_on_from(
    path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    run(path, fine)
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    with pytest.raises(DataError, match=said):
        run(path, fine, goes_on=True)


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MedusaKitError, match=r"cannot be saved as .*File exists") as raised:
        run(tmp_path / "file" / "report.json", raises(AssertionError("measured")))
    assert raised.value.hint == "name another folder with --output"


def test_a_disk_that_is_full_later_costs_no_figure(path: Path, capsys: Any) -> None:
    def fills(bench: Workbench) -> dict[str, Any]:
        path.unlink()
        path.mkdir()  # nobody, root included, can put a file in its place
        return {}

    report = run(path, fine, fills, fine)
    assert statuses(report) == ["done"] * 3
    assert "cannot be saved" in str(report.unsaved)
    assert capsys.readouterr().err.count("warning:") == 1


def test_what_does_not_fit_into_the_budget_is_left_out() -> None:
    report = run(None, fine, fine, minutes=0.0)
    assert statuses(report) == ["left out", "left out"]
    assert "no time: 0 s were left" in str(report.records["a"].why)
    assert not report.broken


def test_a_part_is_stopped_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it catches every Exception."""
    monkeypatch.setattr(runner, "MIN_SECONDS", 0.0)

    def endless(bench: Workbench) -> dict[str, Any]:
        for _ in itertools.count():
            try:
                torch.zeros(3).sum()
            except Exception:
                continue
        return {}

    parts = [Part("a", "steps", endless, needs=0.0), Part("b", "steps", fine)]
    report = Report(CPU, True, None)
    run_parts(parts, Workbench(CPU, True, report.figures), report, minutes=0.002)
    assert statuses(report) == ["left out", "left out"]
    assert "stopped: the time was up" in str(report.records["a"].why)


def test_a_lost_device_ends_the_process_with_all_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_is_lost", lambda device: True)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        run(path, fine, raises(RuntimeError("CUDA error: an illegal memory access")), fine)
    told = json.loads(path.read_text())
    assert [part["status"] for part in told["parts"]] == ["done", "failed"]
    assert "running" not in told
