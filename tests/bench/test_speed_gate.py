"""The speed gate's ratios and verdicts, on figures that stand-ins for the two versions give."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rounds import LEAST, in_turn, verdict
from benchmarks.speed_gate import __main__ as script
from benchmarks.speed_gate.cases import Case, Questions, Setup, cases, setups
from benchmarks.speed_gate.versions import ROOT, checked_out
from medusa_kit.errors import ConfigError

ASSETS = ROOT / "medusa_kit" / "assets" / "verify_prompts.jsonl"


def around(speed: float, seed: int) -> list[float]:
    drawn = random.Random(seed)
    return [speed * drawn.uniform(0.97, 1.03) for _ in range(12)]


def test_a_case_is_slower_where_its_whole_interval_is() -> None:
    old = around(100.0, 0)
    assert verdict(old, around(100.0, 1), "speed").state == "fine"
    slower = verdict(old, around(90.0, 1), "speed")
    assert slower.state == "slower"
    assert slower.low is not None
    assert slower.high is not None
    assert slower.low < slower.ratio < slower.high < LEAST
    noisy = [speed * (1.3 if n % 2 else 0.6) for n, speed in enumerate(old)]
    assert verdict(old, noisy, "speed").state == "fine", "the interval reaches further"
    assert verdict(old[:5], [0.5 * one for one in old[:5]], "speed").state == "undecided"


def test_costs_are_turned_round() -> None:
    seconds = around(2.0, 0)
    better = verdict(seconds, [one / 2 for one in seconds], "cost")
    assert (better.ratio, better.state) == (pytest.approx(2.0), "fine")
    assert verdict(seconds, [one * 2 for one in seconds], "cost").state == "slower"


def test_one_count_more_is_slower() -> None:
    assert verdict([3, 3], [3, 2], "count").state == "fine"
    assert verdict([3, 3], [2, 4], "count").state == "slower"
    assert verdict([0], [0], "count").ratio == 1.0


def test_both_versions_begin_in_turn() -> None:
    orders = [in_turn("ab", "case", number) for number in range(20)]
    assert {tuple(one) for one in orders} == {("a", "b"), ("b", "a")}
    assert orders == [in_turn("ab", "case", number) for number in range(20)]


class StandIn:
    """Answers a question as a table says: figures, or an error."""

    told: Mapping[str, Mapping[str, Any]]
    asked: list[tuple[str, int]]

    def __init__(self, folder: Path, *_: Any) -> None:
        self.folder = str(folder)

    def ask(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append((self.folder, command.get("number", -1)))
        return self.told[self.folder]

    def close(self) -> None:
        pass


class Numbers(Questions):
    def of(self, case: Case, number: int) -> Any:
        return {"number": number}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def call(old: Any, new: Any, task: str | None = None) -> Any:
        monkeypatch.setattr(script, "Worker", StandIn)
        monkeypatch.setattr(StandIn, "told", {"o": old, "n": new}, raising=False)
        monkeypatch.setattr(StandIn, "asked", [], raising=False)
        folders = {"old": Path("o"), "new": Path("n")}
        gate = script.Gate(folders, tmp_path, tmp_path, 6, Numbers(ASSETS, None))
        return gate.run(Setup(), [Case("one", "float32", {}, 1, task)])

    return call


def test_every_question_is_asked_of_both_and_the_first_is_not_counted(run: Any) -> None:
    figures = {"figures": {"tokens/s": 10.0}, "said": [1]}
    found = run(figures, figures)
    assert sorted(StandIn.asked) == sorted((v, n) for v in "on" for n in range(7))
    assert found["one"]["tokens/s"].pairs == 6
    assert script.failures(found) == []
    slower = run(figures, {"figures": {"tokens/s": 9.0}, "said": [2]})
    assert script.failures(slower) == ["one"]
    assert slower["one"]["other answers"] == 7
    assert any("slower" in row for row in script.rows_of(slower))


def test_what_cannot_run_is_told(run: Any) -> None:
    figures, error = {"figures": {"MB": 1.0}}, {"error": "ConfigError: lacks AVX"}
    assert run(error, error) == {"one": {"skipped": "ConfigError: lacks AVX"}}
    broken = run(figures, error)
    assert broken == {"one": {"broken": "ConfigError: lacks AVX"}}
    assert script.failures(broken) == ["one"]
    skipped = run(figures, figures, "summarization")
    assert "TASKS" in skipped["one"]["skipped"]
    assert script.failures(skipped) == []
    assert "TASKS" in script.rows_of(skipped)[0][-1]


def test_every_case_has_a_setup_and_questions_that_differ(tmp_path: Path) -> None:
    known, prepared = cases(8, tmp_path), setups(tmp_path / "file.gguf", "avx2")
    questions = Questions(ASSETS, None)
    for case in known:
        assert case.setup in prepared, case.name
        if case.task != "none":
            assert questions.of(case, 1) != questions.of(case, 2), case.name
    assert [one.name for one in script.chosen_of("server,4k-auto", known)] == [
        "context-4k-auto", "server-8",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="'nothing'"):
        script.chosen_of("server,nothing", known)


def test_an_unknown_commit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-commit"), checked_out("no-such-commit"):
        pass
