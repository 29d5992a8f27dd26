"""The arithmetic of a bench report, on methods whose answers and times are made up."""

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_kit import console
from medusa_kit.bench.about import About
from medusa_kit.bench.bench import Batch, Method, bench
from medusa_kit.bench.report import Answers, BenchReport, Decoding, MethodResult, Tally
from medusa_kit.cli.bench_report import _gain, show
from medusa_kit.errors import DataError
from medusa_kit.settings.sampling import SamplingParams

PROMPTS = [[1], [2], [3]]


def stats(num_steps: int, *shares: float) -> Any:
    return SimpleNamespace(num_steps=num_steps, acceptance_by_depth=list(shares))


def made_up_report() -> tuple[BenchReport, list[tuple[str, int]]]:
    """(report, the calls in order as (method, prompt))."""
    calls: list[tuple[str, int]] = []
    slow = {1: ([7] * 10, 1.0), 2: ([8] * 10, 2.0), 3: ([9] * 20, 1.0)}
    fast = {
        1: ([7] * 10, 0.5, stats(6, 0.5)),
        2: ([8] * 10, 0.5, stats(2, 1.0, 1.0, 0.5)),
        3: ([9] * 19 + [0], 1.0, stats(12, 0.25)),
    }

    def run_slow(batch: Batch) -> Answers:
        calls.append(("slow", batch[0][0]))
        tokens, seconds = slow[batch[0].pop()]
        return Answers([tokens], seconds)

    def run_fast(batch: Batch) -> Answers:
        calls.append(("fast", batch[0][0]))
        tokens, seconds, steps = fast[batch[0].pop()]
        return Answers([tokens], seconds, [steps])

    methods = [Method("slow", run_slow), Method("fast", run_fast)]
    return bench(methods, [list(ids) for ids in PROMPTS], 20), calls


def echo(batch: Batch) -> Answers:
    """Every prompt answered by itself, a second for each batch."""
    return Answers([list(ids) for ids in batch], 1.0)


def test_the_order_rotates_after_one_warm_up_each() -> None:
    _, calls = made_up_report()
    assert calls[:2] == [("slow", 1), ("fast", 1)]
    assert calls[2:] == [("slow", 1), ("fast", 1), ("fast", 2), ("slow", 2), ("slow", 3),
                         ("fast", 3)]  # fmt: skip


def test_totals_and_ratios() -> None:
    report, _ = made_up_report()
    slow, fast = report.results
    assert (slow.name, slow.total.tokens, slow.total.seconds) == ("slow", 40, 4.0), "no warm-up"
    assert (fast.name, fast.total.tokens, fast.total.seconds) == ("fast", 40, 2.0)
    assert (slow.total.tokens_per_second, fast.total.tokens_per_second) == (10.0, 20.0)
    assert (slow.total.ratio(slow.total), fast.total.ratio(slow.total)) == (1.0, 2.0)
    assert fast.total.rates == [20.0, 20.0, 20.0]
    assert slow.total.rates == [10.0, 5.0, 20.0]
    assert fast.total.median_ratio(slow.total) == 2.0, "of 2, 4 and 1"
    assert (slow.total.identical, fast.total.identical) == (3, 2)
    assert report.identical_to == "slow"
    assert (report.num_prompts, report.max_new_tokens) == (3, 20)


def looping(batch: Batch) -> Answers:
    """Prompt 2 is answered by a loop, in a tenth of the time."""
    ids = [*range(30), *[7, 8] * 20] if batch[0][0] == 2 else list(range(10))
    return Answers([ids], 0.1 if batch[0][0] == 2 else 1.0)


def test_loops_are_compared_and_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    prompts: list[list[int]] = [[1], [2], [3]]
    report = bench([Method("a", looping)], prompts, 70, categories=["x", "y", "x"])
    total = report.results[0].total
    assert (total.answers, total.identical, report.loops) == (3, 3, 1)
    assert (total.tokens, total.seconds, total.rates) == (20, 2.0, [10.0, 10.0])
    only = report.results[0].categories["y"]
    assert (only.tokens, only.answers) == (70, 1), "nothing else can be timed there"
    assert BenchReport.from_json(report.to_json()).loops == 1
    show(report, {}, "m", "here")
    assert "1 of 3 answers end in a loop, one span over and over: they are" in said(capsys)

    alone = bench([Method("a", looping)], [[2], [2]], 70)
    assert (alone.loops, alone.results[0].total.tokens) == (2, 140)
    show(alone, {}, "m", "here")
    assert "2 prompts, and all answers end in loops, which any drafter" in said(capsys)


def test_who_shares_a_batch_with_a_loop_is_left_out_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A batch is timed as a whole."""

    def together(batch: Batch) -> Answers:
        alone = [looping([prompt]) for prompt in batch]
        return Answers([one.token_ids[0] for one in alone], sum(one.seconds for one in alone))

    prompts = [[n] for n in (1, 2, 1, 1, *[1] * 8)]
    report = bench([Method("a", together)], prompts, 70, batch_size=4)
    assert (report.loops, report.left_out) == (1, 4)
    assert report.results[0].total.tokens == 80
    assert BenchReport.from_json(report.to_json()).left_out == 4
    assert report.doubt is None
    show(report, {}, "m", "here")
    assert (
        "1 of 12 answers end in a loop, one span over and over: their batches, 4 prompts in "
        "all, are left out" in said(capsys)
    )

    few = bench([Method("a", together)], prompts[:8], 70, batch_size=4)
    assert few.doubt == "a gain of 4 prompts is chance: give 6 or more"
    nothing = bench([Method("a", together)], prompts[:4], 70, batch_size=4)
    assert nothing.says_nothing
    show(nothing, {}, "m", "here")
    told = said(capsys)
    assert "4 prompts, and each batch has an answer that ends in a loop, which any" in told
    assert "left out" not in told


def test_loops_of_different_methods_are_different_prompts() -> None:
    def other(batch: Batch) -> Answers:
        return looping([[2 if batch[0][0] == 1 else 1]])

    methods = [Method("a", looping), Method("b", other)]
    report = bench(methods, [[1], [2]], 70)
    assert (report.loops, report.left_out, report.says_nothing) == (2, 2, True)

    def both(batch: Batch) -> Answers:
        first, second = (looping([prompt]) for prompt in batch)
        return Answers([first.token_ids[0], second.token_ids[0]], 1.0)

    def reversed_prompts(batch: Batch) -> Answers:
        return both([batch[1], batch[0]])

    methods = [Method("a", both), Method("b", reversed_prompts)]
    assert bench(methods, [[1], [2]], 70, batch_size=2).loops == 2


def counted_tokens(batch: Batch) -> Answers:
    return Answers([[1]], 1.0, decoding=Decoding(1, 0.5))


def kit_methods(run: Any) -> list[Method]:
    return [Method("plain", run, kind="ours", drafter="none"),
            Method("heads", run, kind="ours", drafter="medusa")]  # fmt: skip


def test_no_gain_is_told_of_loops_alone_and_doubt_of_few_prompts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loop(batch: Batch) -> Answers:
        return replace(looping([[2]]), decoding=Decoding(70, 0.1))

    report = bench(kit_methods(loop), [[1]], 70)
    assert str(report.doubt).startswith("1 prompt, and its answer is a loop")
    assert _gain(report, report.results[1]) == "–"
    show(report, {}, "m", "here")
    assert "m: 1 prompt, 70 new" in said(capsys)

    few = bench(kit_methods(counted_tokens), [[1], [2]], 70)
    assert few.doubt == "a gain of 2 prompts is chance: give 6 or more"
    assert _gain(few, few.results[1]) == "1.00 ×"
    enough = bench(kit_methods(counted_tokens), [[n] for n in range(6)], 70)
    assert enough.doubt is None


def test_a_ratio_of_nothing_is_a_dash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Tally().ratio(Tally()) is Tally().median_ratio(Tally()) is None
    assert (console.times(None), console.times(2.0)) == ("–", "2.00 ×")
    monkeypatch.setattr(console, "LOG_SECONDS", 0.0)
    bench([Method("a", looping, warm=True)], [[2], [1]], 70)
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("only loops so far")
    assert last.endswith("best 1.00 × a")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_acceptance_is_weighted_by_steps() -> None:
    report, _ = made_up_report()
    slow, fast = (result.total for result in report.results)
    assert (slow.acceptance_length, slow.acceptance_by_depth) == (None, [])
    assert fast.num_steps == 20
    assert fast.acceptance_length == (40 - 3) / 20
    assert fast.acceptance_by_depth == pytest.approx([(3 + 2 + 3) / 20, 2 / 20, 1 / 20])


def test_a_report_as_json() -> None:
    report, _ = made_up_report()
    record = json.loads(json.dumps(report.to_json()))
    assert [method["name"] for method in record["methods"]] == ["slow", "fast"]
    fast = record["methods"][1]
    assert (fast["ratio"], fast["median_ratio"], fast["tokens_per_second"]) == (2.0, 2.0, 20.0)
    assert fast["acceptance_length"] == (40 - 3) / 20
    assert fast["identical"] == 2


def test_a_report_is_read_as_it_was_written() -> None:
    report, _ = made_up_report()
    report.about = About.of("some", SamplingParams(0.5), heads={"a": None}, other={"kept": [1]})
    record = json.loads(json.dumps(report.to_json()))
    read = BenchReport.from_json(record)
    assert (read, read.to_json()) == (report, record)
    assert read.about.sampled == "temperature 0.5, seed 0"


@pytest.mark.parametrize(
    ("name", "kind", "drafter"),
    [
        ("transformers generate", "transformers", None),
        ("transformers assisted (tiny)", "peer", None),
        ("flashspec (prompt lookup)", "peer", None),
        ("endpoint, some, auto", "endpoint", None),
        ("medusa-kit, plain decoding", "ours", "none"),
        ("medusa-kit, one node", "ours", "none"),
        ("fresh, auto", "ours", "auto"),
        ("medusa-kit, runs/heads", "ours", None),
    ],
)
def test_files_of_earlier_versions_say_less(name: str, kind: str, drafter: str | None) -> None:
    """What a method is follows from its name, tokens of steps from the answers."""
    report, _ = made_up_report()
    record = json.loads(json.dumps(report.to_json()))
    fast = record["methods"][1]
    for key in ("kind", "drafter", "step_tokens", "lossy", "activations", "identical_to",
                "decoding_tokens", "decoding_seconds"):  # fmt: skip
        del fast[key]
    del record["agreement_with_float32"], record["batch_size"]
    fast["name"] = name
    read = BenchReport.from_json(record)
    assert read.results[1] == replace(report.results[1], name=name, kind=kind, drafter=drafter)
    assert (read.batch_size, read.agreement) == (1, None)


def test_decoding_alone_leaves_the_prompts_out() -> None:
    tally = Tally()
    assert tally.decoding_tokens_per_second is None
    for tokens, seconds in ((4, 1.0), (0, 0.5)):  # the second answer was one token
        tally.add(Answers([[1] * (tokens + 1)], 3.0, decoding=Decoding(tokens, seconds)), 1)
    assert tally.decoding_tokens_per_second == 4 / 1.5
    assert tally.tokens_per_second == 1.0


def test_the_median_stands_between_two_prompts() -> None:
    theirs, ours = Tally(), Tally()
    for seconds in (1.0, 1.0):
        theirs.add(Answers([[1]], seconds), 1)
    for seconds in (1.0, 0.25):
        ours.add(Answers([[1]], seconds), 1)
    assert ours.median_ratio(theirs) == 2.5


def test_batches_are_of_one_category_and_all_sizes_are_warmed_up() -> None:
    seen: list[Batch] = []

    def watched(batch: Batch) -> Answers:
        seen.append(batch)
        return echo(batch)

    prompts = [[1], [2, 2], [3], [4], [5], [6, 6, 6]]
    categories = ["math", "code", "math", "math", None, "code"]
    report = bench([Method("a", watched)], prompts, 9, batch_size=2, categories=categories)
    expected = [[[1], [3]], [[4]], [[2, 2], [6, 6, 6]], [[5]]]
    assert seen == [[[2, 2], [6, 6, 6]], [[4]], *expected], "the longest of each size comes first"
    assert report.categories == ["math", "code", "(none)"]
    (result,) = report.results
    tallies = {name: (tally.answers, tally.tokens, tally.seconds)
               for name, tally in result.categories.items()}  # fmt: skip
    assert tallies == {"math": (3, 3, 2.0), "code": (2, 5, 1.0), "(none)": (1, 1, 1.0)}
    assert (result.total.answers, result.total.identical, len(result.total.rates)) == (6, 6, 4)
    (record,) = report.to_json()["methods"]
    assert record["categories"]["code"]["tokens_per_second"] == 5.0
    plain = bench([Method("a", echo)], prompts, 9, batch_size=4)
    assert (plain.categories, plain.results[0].total.rates) == ([], [5.0, 4.0])


def test_sampled_answers_are_held_against_the_first_of_ours() -> None:
    def nines(batch: Batch) -> Answers:
        return Answers([[9] for _ in batch], 1.0)

    methods = [Method("theirs", echo), Method("one node", echo, kind="ours"),
               Method("heads", nines, kind="ours")]  # fmt: skip
    report = bench(methods, [[1], [9], [3]], 9, sampled=True)
    assert [result.total.identical for result in report.results] == [None, 3, 1]
    assert report.identical_to == "one node"
    assert json.loads(json.dumps(report.to_json()))["methods"][0]["identical"] is None


@pytest.mark.parametrize("sampled", [False, True])
def test_lossy_answers_are_never_the_same(sampled: bool) -> None:
    """Not even with equal tokens; and no other answers are compared with them."""
    methods = [Method("theirs", echo), Method("rounded", echo, kind="ours", lossy=True),
               Method("exact", echo, kind="ours")]  # fmt: skip
    report = bench(methods, [[1], [2]], 9, sampled=sampled)
    same = [result.total.identical for result in report.results]
    assert same == [None if sampled else 2, None, 2]
    assert report.identical_to == ("exact" if sampled else "theirs")
    assert [record["lossy"] for record in report.to_json()["methods"]] == [False, True, False]


def failing(on: Sequence[int], error: Exception) -> Any:
    def run(batch: Batch) -> Answers:
        if batch[0] == list(on):
            raise error
        return echo(batch)

    return run


def test_a_peer_that_fails_is_left_out_with_its_reason() -> None:
    calls: list[Batch] = []

    def late(batch: Batch) -> Answers:
        calls.append(batch)
        return failing([2], RuntimeError("no kernel\nfor this"))(batch)

    methods = [
        Method("first", echo),
        Method("at once", failing([1], DataError("nothing here", hint="h"))),
        Method("late", late),
        Method("ours", echo, kind="ours"),
    ]
    report = bench(methods, PROMPTS, 9)
    reasons = [result.not_run for result in report.results]
    assert reasons == [None, "nothing here", "RuntimeError: no kernel", None]
    assert [result.name for result in report.ran] == ["first", "ours"]
    assert calls == [[[1]], [[1]], [[2]]], "not asked again"
    assert report.ran[1].total.answers == 3
    assert report.to_json()["methods"][2] == {
        "name": "late", "kind": "peer", "drafter": None, "not_run": reasons[2]}  # fmt: skip


@pytest.mark.parametrize("ours", [False, True])
def test_the_first_method_and_ours_must_not_fail(ours: bool) -> None:
    bad = Method("bad", failing([2], RuntimeError("broken")), kind="ours" if ours else "peer")
    methods = [Method("first", echo), bad] if ours else [bad]
    with pytest.raises(RuntimeError, match="broken"):
        bench(methods, PROMPTS, 9)


def test_no_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match="no prompt"):
        bench([Method("a", echo)], [], 9)


def test_the_table_has_draftings_gain_over_own_plain_decoding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of decoding alone, which the ratio to the first method is not."""
    results = [
        MethodResult(name, kind=kind, drafter=drafter, total=Tally(
            answers=1, tokens=10, seconds=1.0, rates=[10.0], decoding_tokens=tokens,
            decoding_seconds=1.0, num_steps=5, step_tokens=9))
        for name, kind, drafter, tokens in (
            ("transformers generate", "transformers", None, 1),
            ("medusa-kit, plain decoding", "ours", "none", 8),
            ("medusa-kit, auto", "ours", "auto", 10),
        )
    ]  # fmt: skip
    report = BenchReport(results, 1, 10, about=About(sampling={}))
    assert [_gain(report, result) for result in results] == ["–", "–", "1.25 ×"]
    console.out.width, before = 200, console.out.width
    show(report, {}, "m", "here")
    console.out.width = before
    shown = capsys.readouterr().out
    assert "gain" in shown
    assert "1.25 ×" in shown


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_is_readable_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(console.out, "_width", width)
    report, _ = made_up_report()
    report.results[1].name = "medusa-kit, prompt lookup and heads"
    show(report, {}, "m", "here")
    out = capsys.readouterr().out
    assert "…" not in out
    for word in ("method", "tokens/s", "ratio", "decoding", "gain", "accept.", "same"):
        assert word in out
    assert max(map(len, out.split("decoding only:")[0].splitlines())) <= width


def test_categories_of_one_prompt_each_are_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    for categories, shown in ((["x", "y", "z"], False), (["x", "y", "x"], True)):
        report = bench([Method("a", echo)], [[1], [2], [3]], 5, categories=categories)
        show(report, {}, "m", "here")
        assert ("by category" in said(capsys)) == shown
