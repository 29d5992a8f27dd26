"""What the demo says of speeds, and how it fits its work into the time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_kit.bench.bench import Batch, Method, bench
from medusa_kit.bench.interval import Interval
from medusa_kit.bench.report import ONE_NODE, TRANSFORMERS, Answers
from medusa_kit.demo import comparison, messages, own_heads, threads
from medusa_kit.demo.comparison import Comparison, Size, fitting
from medusa_kit.demo.curve import Point, lines
from medusa_kit.demo.work import LIMITS, Deadline, Work
from medusa_kit.quick.answers import Written

PROMPTS = [[number] for number in range(1, 9)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def method(name: str, seconds: float, jitter: float = 0.0) -> Method:
    """Ten tokens an answer; `jitter`: how much slower even prompts are, and faster odd ones."""

    def run(batch: Batch) -> Answers:
        sign = 1 if batch[0][0] % 2 else -1
        return Answers([[7] * 10], seconds * (1 + sign * jitter))

    return Method(name, run, kind="transformers" if name == TRANSFORMERS else "ours")


def made_up(*methods: Method) -> Comparison:
    return Comparison(bench(methods, PROMPTS, 10), {})


def test_drafting_and_the_total_are_two_columns(capsys: pytest.CaptureFixture[str]) -> None:
    found = made_up(
        method(TRANSFORMERS, 4.0), method(ONE_NODE, 1.0), method("the kit's, medusa", 0.8),
        method("the kit's, auto", 1.0, jitter=0.2),
    )  # fmt: skip
    messages.first_table(found, Size(8, 10))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]]
            for line in capsys.readouterr().out.splitlines() if line.startswith("│")]  # fmt: skip
    cells = {row[0]: row[3:] for row in rows}
    assert cells["transformers"] == ["–", "1"]
    assert cells["plain decoding"] == ["1", "4.00 (4.00–4.00)"]
    assert cells["the kit's heads"] == ["1.25 (1.25–1.25)", "5.00 (5.00–5.00)"]
    assert cells["auto (default)"][0] == "none (0.83–1.25)"


def test_no_claim_where_the_interval_holds_one() -> None:
    assert "faster than plain decoding on this machine, 1.20 ×" in messages.gain(
        "heads", Interval(1.2, 1.1, 1.3)
    )
    assert "slower than plain decoding" in messages.gain("heads", Interval(0.8, 0.7, 0.9))
    said = messages.gain("heads", Interval(1.2, 0.9, 1.4))
    assert "no measurable difference on this machine" in said
    assert "1.20" not in said
    assert "too few prompts" in messages.gain("heads", None)


def test_what_is_missing_is_named() -> None:
    work = Work(answers=100, updates=50)
    done = own_heads.Trained(100, 9000, 50, [], False)
    assert messages.not_done(work, done) == ""
    done = own_heads.Trained(80, 9000, 50, [], False)
    assert messages.not_done(work, done) == "20 of 100 answers"
    done = own_heads.Trained(80, 9000, 10, [], False)
    assert messages.not_done(work, done) == "20 of 100 answers and 40 of 50 updates"


def test_the_curve_in_text() -> None:
    first, last = lines([Point(0, 1.1), Point(25, 1.4)])
    assert first.split()[:3] == ["0", "updates", "1.10"]
    assert last.count("█") == 4 * first.count("█")
    assert "█" not in lines([Point(0, 1.0)])[0]


@pytest.mark.parametrize(
    ("seconds", "size"),
    [
        (1e9, Size(8, 96)),
        (96 * (3 * 9 + 8 * 10) - 1, Size(8, 32)),
        (32 * (3 * 7 + 6 * 10), Size(6, 32)),
        (96 * 3 * 7, Size(8, 32, False)),
        (0.0, Size(6, 32, False)),
    ],
)
def test_measurements_are_sized_to_the_speeds_of_now(
    monkeypatch: pytest.MonkeyPatch, seconds: float, size: Size
) -> None:
    """A second a step of ours, ten of transformers."""
    monkeypatch.setattr(comparison, "plain_step", lambda *_: 1.0)
    oracle: Any = SimpleNamespace(generate=lambda ids, count, **_: ([7] * count, 10.0 * count))
    engine: Any = None
    assert fitting(engine, oracle, PROMPTS, 96, seconds) == size


@pytest.mark.parametrize("fewer_is_faster", [True, False])
def test_one_thread_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fewer_is_faster: bool
) -> None:
    used = torch.get_num_threads()

    def made_up(count: int) -> float:
        torch.set_num_threads(count)
        return float(count if fewer_is_faster else -count)

    monkeypatch.setattr(threads, "seconds_with", made_up)
    try:
        torch.set_num_threads(2)
        found = threads.settle()
        assert found == ((1, 2) if fewer_is_faster else (2, 2))
        assert torch.get_num_threads() == found[0]
    finally:
        torch.set_num_threads(used)
    messages.intro(Work(), "a processor", *found)
    said = " ".join(capsys.readouterr().out.split())
    assert ("one thread is faster than 2 now" in said) == fewer_is_faster


def test_updates_stop_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setitem(LIMITS, "training", 0.7)
    pace = own_heads._Pace(Work(updates=100), Deadline(1000.0, clock))
    assert pace(0, 900) == 100
    clock.now = 100.0  # 10 updates in 100 s: 60 more fit into the 600 s that are left
    assert pace(10, 100) == 70
    clock.now = 5000.0
    assert pace(30, 70) == 30


def test_answers_stop_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "answers", 0.5)
    clock = Clock()
    more = own_heads._more(100, Deadline(1000.0, clock))
    assert more(Written()) == own_heads.FIRST_ROUND
    after = Written(num_prompts=16, answers=16, tokens=1600, new_tokens=1600, seconds=160.0)
    assert more(after) == 48
    clock.now = 300.0
    assert more(after) == 20, "200 s at 10 tokens/s, answers of 100"
    clock.now = 501.0
    assert more(after) == 0
    assert own_heads._more(16, Deadline(1000.0, clock))(after) == 0
