"""t(n): measured once, kept, refined."""

import json
import random
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from support.small_engines import build_engine
from support.tiny_models import tiny_base
from support.wrapped import WrappedVerifier, raising

from medusa_kit import console
from medusa_kit.base.remembered_checks import code_digest
from medusa_kit.infer.decode import measured
from medusa_kit.infer.decode.measured import MeasuredSteps, Turn
from medusa_kit.infer.decode.node_choice import waiting
from medusa_kit.infer.decode.node_choice.cost import SIZES, SLOPE, StepCost
from medusa_kit.infer.decode.node_choice.waiting import longest, waits
from medusa_kit.infer.verifier import Verifier


def test_what_was_measured_is_told_between_sizes_and_beyond() -> None:
    cost = StepCost(measured={1: 0.010, 2: 0.012, 4: 0.020, 8: 0.028})
    assert [cost.seconds(n) for n in (1, 2, 3, 4, 6, 8, 10)] == pytest.approx(
        [0.010, 0.012, 0.016, 0.020, 0.024, 0.028, 0.032]
    )
    assert cost.up_to(4) == pytest.approx([0.010, 0.010, 0.012, 0.016, 0.020])


def test_a_slower_machine_changes_all_sizes_alike() -> None:
    cost = StepCost(measured={1: 0.010, 2: 0.012, 4: 0.020, 8: 0.028})
    for _ in range(60):
        cost.record(2, 0.024)  # twice as slow, seen at one size
    assert cost.seconds(8) / cost.seconds(1) == pytest.approx(2.8, rel=0.1)
    assert cost.seconds(8) == pytest.approx(0.056, rel=0.1)


def test_a_wrong_first_figure_is_mended_while_running() -> None:
    true = {1: 0.010, 2: 0.012, 4: 0.020, 8: 0.028}
    cost, draw = StepCost(measured={**true, 4: 0.050}), random.Random(3)
    for _ in range(3000):
        size = draw.choice([1, 2, 4, 8])
        cost.record(size, true[size] * draw.uniform(0.95, 1.05))
    for size, seconds in true.items():
        assert cost.seconds(size) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("cost", [StepCost(), StepCost(measured={1: 0.010, 2: 0.012})])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_clock_that_stands_still_or_goes_back_says_nothing(
    cost: StepCost, seconds: float
) -> None:
    before = cost.up_to(8)
    cost.record(1, seconds)
    assert cost.up_to(8) == before
    assert 0 < cost.least_chance(1) < 1


def nodes_worth(cost: StepCost, chances: list[float]) -> int:
    times, tokens = cost.up_to(len(chances) + 1), [1.0]
    for chance in sorted(chances, reverse=True):
        tokens.append(tokens[-1] + chance)
    return max(range(1, len(tokens) + 1), key=lambda n: tokens[n - 1] / times[n])


@pytest.mark.parametrize("slope", [0.1, 0.3, 0.6])
def test_figures_of_a_disturbed_machine_are_mended_within_an_answer(slope: float) -> None:
    """Each more node seemed to take 0.58 of the first. Steps verify what seems worth it, so a size
    that seems too expensive is hardly ever tried."""
    disturbed = {n: 0.010 * (1 + 0.58 * (n - 1)) for n in SIZES}
    cost, draw = StepCost(measured=disturbed, undisturbed=False), random.Random(3)
    for _ in range(300):
        clear = draw.random()
        chances = [clear * draw.random() ** 0.5 * 0.8**place for place in range(8)]
        nodes = 1 if draw.random() < 0.1 else nodes_worth(cost, chances)
        cost.record(nodes, 0.004 * (1 + slope * (nodes - 1)) * draw.uniform(0.9, 1.1))
    assert cost.least_chance(1) == pytest.approx(slope, rel=0.35)


def test_equal_steps_say_nothing_of_how_sizes_compare() -> None:
    """Three nodes at every step, on a machine that becomes four times as fast, or as slow."""
    for change in (4.0, 0.25):
        cost, draw = StepCost(measured={1: 0.010, 2: 0.012, 4: 0.020}), random.Random(5)
        for step in range(5000):
            cost.record(3, 0.016 * change ** (step / 5000) * draw.uniform(0.95, 1.05))
        assert cost.seconds(1) / cost.seconds(3) == pytest.approx(10 / 16, rel=0.01)
        assert cost.seconds(4) / cost.seconds(3) == pytest.approx(20 / 16, rel=0.01)


def test_a_step_of_another_size_tells_how_it_compares() -> None:
    """One node, which takes 10 ms and not 15, once in twenty steps."""
    cost = StepCost(measured={1: 0.015, 2: 0.016, 4: 0.020})
    for step in range(4000):
        cost.record(*((1, 0.010) if step % 20 == 0 else (4, 0.020)))
    assert cost.seconds(1) / cost.seconds(4) == pytest.approx(0.5, rel=0.1)


def test_more_nodes_never_cost_less() -> None:
    cost = StepCost(measured={1: 0.010, 2: 0.009, 4: 0.020})
    times = cost.up_to(12)
    assert all(after >= before for before, after in pairwise(times))


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verifier:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path))
    return build_engine(tiny_base("llama")).verifier


def given(verifier: Verifier, times: Mapping[int, Sequence[float]]) -> MeasuredSteps:
    """Whose steps take these times, where they are measured."""
    turns = {size: [Turn(seconds) for seconds in taken] for size, taken in times.items()}
    return MeasuredSteps(verifier, measure=lambda *_: turns)


def nobody_waits() -> dict[str, float]:
    return {}


def kept_file(folder: Path) -> Path:
    (file,) = (folder / "step_times").iterdir()
    return file


def test_steps_are_timed_once_and_read_from_the_file_afterwards(
    verifier: Verifier, tmp_path: Path
) -> None:
    ticks = count()
    steps = MeasuredSteps(
        verifier, lambda: float(next(ticks)), waits=nobody_waits
    )  # all take the same time
    first = steps.cost
    kept = json.loads(kept_file(tmp_path).read_text())
    assert first.seconds(1) == kept["seconds"]["1"] > 0
    assert steps.cost is first
    later = MeasuredSteps(verifier, measure=raising(AssertionError("measured again")))
    assert later.cost.up_to(9) == first.up_to(9)


@pytest.mark.parametrize("busy", [False, True])
def test_times_of_a_busy_machine_are_taken_anew_at_the_next_start(
    verifier: Verifier, busy: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """One turn of two nodes saw the machine alone and nine did not, or two of ten."""
    two = [0.011, *[0.020] * 9] if busy else [0.012] * 2 + [0.020] * 8
    with console.details(True):
        cost = given(verifier, {1: [0.010] * 10, 2: two}).cost
    assert cost.seconds(2) == (0.011 if busy else 0.012)  # the best that is known
    assert ("timed again at the next start" in capsys.readouterr().err) == busy
    later = given(verifier, {1: [0.010], 2: [0.0115]})
    assert later.cost.seconds(2) == (0.0115 if busy else 0.012)


@pytest.mark.parametrize(
    ("others", "kept"), [(0.0, True), (0.4, False)], ids=["none", "one that never rests"]
)
def test_times_beside_a_program_that_never_rests_are_never_kept(
    verifier: Verifier, tmp_path: Path, others: float, kept: bool
) -> None:
    """All turns agree, since all are equally slow; that a thread waited is what tells."""
    now = waited = 0.0

    def step(compute: Any, cache: Any, trees: Any, rows: Any) -> Any:
        nonlocal now, waited
        taken = 0.002 + 0.001 * trees.counts[0]
        now, waited = now + taken / (1 - others), waited + taken / (1 - others) * others
        return compute(cache, trees, rows)

    timed: Any = WrappedVerifier(verifier, score=step)
    slow = MeasuredSteps(
        timed, lambda: now, waits=lambda: {"this": 0.0, "a thread of the kernels": waited}
    )
    assert slow.cost.seconds(1) == pytest.approx(0.003 / (1 - others))  # this process has no other
    assert json.loads(kept_file(tmp_path).read_text())["alone"] == kept
    free = given(verifier, {1: [0.003], 2: [0.0045]})
    assert free.cost.seconds(2) == pytest.approx(0.004 if kept else 0.0045)


def test_turns_count_that_had_the_machine_for_themselves(verifier: Verifier) -> None:
    """Two of them are enough, as fast as any."""
    for turns, kept in [
        ([Turn(0.02, False)] * 6 + [Turn(0.01)] * 2, True),
        ([Turn(0.02, False)] * 7 + [Turn(0.01)], False),
        ([Turn(0.01, False)] * 6 + [Turn(0.02)] * 2, False),
    ]:
        assert measured._was_alone({1: turns}) == kept


def test_waiting_is_counted_by_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest({"1": 1.0, "2": 5.0}, {"1": 1.5, "2": 5.1, "3": 0.2}) == pytest.approx(0.5)
    assert longest({}, {}) == 0.0
    for name, text in (("7", "100 2500000000 3\n"), ("8", "5 0 1\n"), ("ended", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    monkeypatch.setattr(waiting, "THREADS", tmp_path)
    assert waits() == {"7": 2.5, "8": 0.0}
    monkeypatch.setattr(waiting, "THREADS", tmp_path / "of another system")
    assert waits() == {}


def test_what_a_busy_machine_makes_expensive_is_not_believed(verifier: Verifier) -> None:
    steps = given(verifier, {1: [0.010] * 10, 2: [0.016, *[0.020] * 9]})
    assert steps.cost.least_chance(1) < 0.2


@pytest.mark.parametrize("taken", [0.0, -0.001, float("nan"), float("inf")])
def test_times_that_cannot_be_leave_the_assumption(verifier: Verifier, taken: float) -> None:
    """A clock stands still or goes back while steps are timed."""
    for _ in range(2):  # the second time they were written to disk
        assert given(verifier, {1: [taken], 2: [0.02]}).cost.least_chance(1) == pytest.approx(SLOPE)


def test_small_steps_are_not_timed_behind_large_ones(verifier: Verifier) -> None:
    """On a machine that takes half as long again for 8 ms after a step of more nodes."""
    now, large_until, last = 0.0, 0.0, 0

    def step(compute: Any, cache: Any, trees: Any, rows: Any) -> Any:
        nonlocal now, large_until, last
        size = trees.counts[0]
        large_until = now + 0.008 if size < last else large_until
        now += (0.002 + 0.001 * size) * (1.5 if now < large_until else 1.0)
        last = size
        return compute(cache, trees, rows)

    timed: Any = WrappedVerifier(verifier, score=step)
    cost = MeasuredSteps(timed, lambda: now, waits=nobody_waits).cost
    assert [cost.seconds(n) for n in SIZES] == pytest.approx([0.002 + 0.001 * n for n in SIZES])


def test_a_turn_counts_once_however_many_steps_it_has(verifier: Verifier) -> None:
    ticks = count()
    times = measured.measured(verifier, lambda: next(ticks) / 1000)
    assert {len(turns) for turns in times.values()} == {measured.REPEATS}


@pytest.mark.parametrize(
    ("scale", "disturbed", "turns"), [(1, 0, 8), (50, 0, 2), (50, 2, 4), (50, 8, 8)]
)
def test_slow_steps_are_timed_until_the_machine_was_seen_free_twice(
    verifier: Verifier, scale: int, disturbed: int, turns: int
) -> None:
    """`disturbed`: first turns beside another program."""
    now = waited = 0.0
    steps = 0

    def step(compute: Any, cache: Any, trees: Any, rows: Any) -> Any:
        nonlocal now, waited, steps
        busy = steps < warm_ups + disturbed * per_turn
        taken = scale * (0.002 + 0.00001 * trees.counts[0])
        now, steps = now + taken * (1 + busy), steps + 1
        waited += taken * busy
        return compute(cache, trees, rows)

    per_turn = len(SIZES) * (2 if scale > 1 else 4)
    warm_ups = len(SIZES)
    timed: Any = WrappedVerifier(verifier, score=step)
    times = measured.measured(timed, lambda: now, lambda: {"of the kernels": waited})
    assert {len(found) for found in times.values()} == {turns}
    assert times[1][-1].seconds == pytest.approx(scale * 0.00201 * (1 + (disturbed > 7)))


def test_only_sizes_that_were_disturbed_are_timed_on(verifier: Verifier) -> None:
    """Turns of one node are short, and beside a large model seldom free; those of 32 take long."""
    now = waited = 0.0

    def step(compute: Any, cache: Any, trees: Any, rows: Any) -> Any:
        nonlocal now, waited
        now += 1.0 * trees.counts[0] / 100
        waited += now if trees.counts[0] == 1 else 0
        return compute(cache, trees, rows)

    timed: Any = WrappedVerifier(verifier, score=step)
    times = measured.measured(timed, lambda: now, lambda: {"of the kernels": waited})
    assert {size: len(turns) for size, turns in times.items()} == {
        size: measured.REPEATS if size == 1 else 2 for size in SIZES
    }


def test_other_kernels_are_timed_anew(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "package" / "infer" / "cpu"
    kernels.mkdir(parents=True)
    digests = []
    for number, source in enumerate(["// slow", "// fast"], start=1):
        (kernels / "matmul.h").write_text(source)
        digests.append(code_digest.__wrapped__(tmp_path / "package"))
        monkeypatch.setattr(measured, "code_digest", lambda: digests[-1], raising=False)
        times = {1: [0.5 / number], 2: [0.7 / number]}
        assert given(verifier, times).cost.seconds(1) == times[1][0]
    assert len(set(digests)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"seconds": 7}',
        '{"seconds": {"1": -1, "2": 3}}',
        '{"seconds": {"1": 0.01, "2": NaN}}',
        '{"seconds": {"1": 5e-324, "2": 5e-324}}',
        '{"seconds": {"1": 1e308, "2": 1.7e308}}',
        '{"seconds": {"1": 0.01, "1000000000000000000000": 0.02}}',
        '{"seconds": {"2": 0.01, "4": 0.02}}',
        '{"seconds": {"1": 1' + 400 * "0" + ', "2": 1}}',
    ],
)
def test_a_damaged_file_is_measured_anew(verifier: Verifier, tmp_path: Path, text: str) -> None:
    """Also where it says the right things of machine, model and code."""
    times = {1: [0.5], 2: [0.7]}
    assert given(verifier, times).cost.seconds(1) == 0.5
    file = kept_file(tmp_path)
    if text.startswith("{") and text != "{}":
        own = json.loads(file.read_text())
        del own["seconds"]
        text = json.dumps(own)[:-1] + f", {text[1:]}"
    file.write_text(text)
    assert given(verifier, {1: [0.3], 2: [0.4]}).cost.seconds(1) == 0.3
    assert json.loads(file.read_text())["seconds"] == {"1": 0.3, "2": 0.4}


@pytest.mark.parametrize("run_by", ["C++ (plain)", "torch"])
@pytest.mark.parametrize(
    ("seconds", "believed"),
    [
        (dict.fromkeys(SIZES, 0.01), False),
        ({1: 0.01, 2: 0.01}, False),
        ({size: 0.01 + size * 1e-6 for size in SIZES}, False),
        ({1: 0.01, 2: 0.0101}, True),
        ({size: 0.01 + size * 1e-3 for size in SIZES}, True),
    ],
    ids=["equal", "two equal", "hardly more", "two", "more"],
)
def test_times_that_do_not_grow_with_the_nodes_are_not_believed_in_cpp(
    verifier: Verifier, seconds: dict[int, float], believed: bool, run_by: str
) -> None:
    verifier.steps_run_by = run_by
    _ = given(verifier, {size: [taken] for size, taken in seconds.items()}).cost
    later = given(verifier, {1: [0.5], 2: [0.7]})
    assert later.cost.seconds(1) == (seconds[1] if believed or run_by == "torch" else 0.5)


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "file"))
    steps = MeasuredSteps(build_engine(tiny_base("llama")).verifier)
    assert steps.cost.seconds(2) > 0
    assert "cannot be written, so the next start will find out again" in capsys.readouterr().err


def test_a_draft_token_beside_another_has_the_price_of_the_next_node() -> None:
    cost = StepCost(measured={1: 1.0, 2: 1.0, 3: 1.5, 4: 2.0})
    assert cost.least_chance(1) == 0.0
    assert cost.least_chance(1, 1) == pytest.approx(0.5)
    assert cost.least_chance(2, 2) == pytest.approx(1.0)


def test_it_says_in_words_what_a_draft_token_is_worth() -> None:
    said = {more: StepCost(measured={1: 1.0, 2: 1.0 + more}).describe(1) for more in (0, 0.3, 1)}
    assert said[0].endswith(": any draft token is worth its cost")
    assert said[0.3].endswith(": a draft token is worth its cost from a chance of 0.30 on")
    assert said[1].endswith(": no draft token is worth its cost")
