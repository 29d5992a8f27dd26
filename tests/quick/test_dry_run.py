"""`train --quick --dry-run` decides whether prompts and hours are enough."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quick_runs import Clock, request_in, write_prompts
from support.typed import typed_command

from medusa_kit.errors import MedusaKitError
from medusa_kit.quick import forecast, plan
from medusa_kit.quick import run as quick_run
from medusa_kit.quick.plan import Rates
from medusa_kit.quick.run import prepared
from medusa_kit.quick.session import Session
from medusa_kit.settings.engine import FLOAT32, INT8

ROOT = Path(__file__).parents[2]
RATES = Rates(300.0, 2000.0, 4000.0, 1.6, 150.0, 1.5)


def session_of(num_prompts: int, hours: float) -> Session:
    prompts = SimpleNamespace(answered=False, answer_tokens=0, training=[None] * num_prompts,
                              calibration=[None] * (num_prompts // 9), test=[])  # fmt: skip
    request = SimpleNamespace(seconds=3600.0 * hours, hours=hours, model="m", output=Path("none"))
    state = SimpleNamespace(seconds=lambda: 0.0)
    parts: Any = (request, prompts, state)
    return Session(*parts)


def said(num_prompts: int, hours: float) -> str:
    session = session_of(num_prompts, hours)
    fit = forecast.fitted(session, RATES)
    return "\n".join(forecast.lines_of(session, fit, 2e9, 1e3))


def test_heads_that_are_there_need_less_text() -> None:
    """100 prompts are too few for new heads, and enough to go on from others."""
    session = session_of(100, 1.0)
    fit = forecast.fitted(session, RATES)
    assert "too little text" in forecast.verdict(session, fit)
    session.__dict__["earlier"] = Path("heads-m/run/heads")
    assert forecast.verdict(session, fit).startswith("enough")
    (line,) = (one for one in forecast.lines_of(session, fit, 2e9, 1e3) if "acceptance" in one)
    assert "continues from heads-m/run/heads" in line


@pytest.mark.slow
def test_it_decides_in_ten_lines_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = typed_command(monkeypatch, capsys, "train")(
        "--quick", "-m", "debug-tiny", "--prompts", prompts.name, "--device", "cpu", "--dry-run"
    )
    assert code == 0, err
    lines = out.strip().splitlines()
    assert [line.split()[0] for line in lines] == [
        "text", "time", "memory", "acceptance", "verdict"]  # fmt: skip
    assert "23 of 23 prompts" in lines[0]
    assert "too little text" in lines[-1]
    assert sorted(tmp_path.rglob("*")) == before


LESS = "; a run works all the same, with less gain"


@pytest.mark.parametrize(
    ("num_prompts", "hours", "verdict"),
    [
        (270, 2.0, "too little text: about 500 prompts give 100,707 training tokens" + LESS),
        (9000, 0.1, r"too little time: 100,707 training tokens take --hours 0\.\d+" + LESS),
        (9000, 2.0, r"enough; more --hours would use the other [\d,]+ prompts"),
        (900, 2.0, "enough; more prompts would use the time that is left"),
    ],
)
def test_the_verdict_names_what_is_missing(num_prompts: int, hours: float, verdict: str) -> None:
    assert re.search(f"verdict +{verdict}$", said(num_prompts, hours), re.M), said(
        num_prompts, hours
    )


def test_the_hours_that_it_names_are_enough() -> None:
    hours = re.search(r"--hours ([\d.]+)", said(9000, 0.1))
    assert hours is not None
    assert "enough" in said(9000, float(hours[1]))


def test_time_for_no_heads_at_all_is_the_error_of_a_run() -> None:
    with pytest.raises(MedusaKitError, match=r"too slow here for 0\.001 hours"):
        said(9000, 0.001)


def test_the_curve_is_that_of_the_page() -> None:
    """Acceptance is from the table under "What to expect", in training.md."""
    page = (ROOT / "docs/training.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| ([\d.]+) \|", page, re.M)
    table = [(int(tokens.replace(",", "")), float(length)) for tokens, length in rows]
    assert list(forecast.MEASURED) == table
    for tokens, length in table:
        assert f"{length:.2f} tokens a step" in forecast.expected_acceptance(tokens)
    assert "about 1.65 tokens" in forecast.expected_acceptance(175_000)
    assert "below 1.60" in forecast.expected_acceptance(40_000)
    assert "above 1.82" in forecast.expected_acceptance(4e6)


def test_a_run_that_is_there_is_named(whole: Any, tmp_path: Path) -> None:
    assert "has a finished run" in str(forecast.already_there(whole.session))
    whole.copied(tmp_path / "heads")
    path = tmp_path / "heads/quick.json"
    record = json.loads(path.read_text())
    del record["phases"]["bench"]
    path.write_text(json.dumps(record))
    request = replace(whole.session.request, output=tmp_path / "heads")
    assert "has a part of this run" in str(forecast.already_there(prepared(request)))
    request = replace(request, output=tmp_path / "other")
    assert forecast.already_there(prepared(request)) is None


def test_answers_that_are_there_are_not_made(whole: Any, tmp_path: Path) -> None:
    answers = whole.session.answers
    request = request_in(tmp_path, answers, Clock())
    session = quick_run.prepared(replace(request, answered=True, hours=1.0))
    session.request.output.mkdir(exist_ok=True)
    lines = forecast.forecast(session)
    assert "answers 0" not in lines
    assert re.search(r"time +about [\d.]+ \w+ of 60.0 min: training", lines)


def test_the_first_plan_has_the_rate_of_the_precision_of_answers(
    request_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out answers are in float32; those to train on may be three times as fast."""
    from medusa_kit.quick import text

    session = quick_run.prepared(request_for())
    asked = list[str]()
    monkeypatch.setattr(text, "activations_for", lambda *_: INT8)
    monkeypatch.setattr(Session, "answering_in", lambda _, activations: activations)
    monkeypatch.setattr(Session, "plain", FLOAT32)
    monkeypatch.setattr(text, "encoded", lambda *_: [[1]])
    monkeypatch.setattr(text, "_rate", lambda engine, _: asked.append(engine) or
                        {FLOAT32: 10.0, INT8: 30.0}[engine])  # fmt: skip
    assert text._faster(session) == 3.0
    given: dict[str, float] = {}
    monkeypatch.setattr(text, "_faster", lambda _: 3.0)
    monkeypatch.setattr(text, "probe", lambda _: 10.0)
    monkeypatch.setattr(text, "_check_enough", lambda _: None)
    monkeypatch.setattr(text, "answer", lambda *_: text.Written(4, 4, 48, 48, 4.8))
    monkeypatch.setattr(text, "_measured", lambda _, rate: given.update(rate=rate) or RATES)
    monkeypatch.setattr(Session, "base", None)
    session.state.open(fresh=False)
    text.run_held_out(session)
    assert given["rate"] == pytest.approx(30.0)
    assert plan.positions_for(100.0, RATES) > 0
