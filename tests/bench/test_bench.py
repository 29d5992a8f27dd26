"""The arithmetic of a bench report, on methods whose answers and times are made up."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import tiny_base

from medusa_kit.bench.bench import BenchReport, MethodResult, bench, standard_methods
from medusa_kit.bench.oracle import Oracle
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.loading import build_engine, with_heads

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

    def run_slow(ids: list[int]) -> Any:
        calls.append(("slow", ids[0]))
        return (*slow[ids.pop()], None)

    def run_fast(ids: list[int]) -> Any:
        calls.append(("fast", ids[0]))
        return fast[ids.pop()]

    report = bench({"slow": run_slow, "fast": run_fast}, [list(ids) for ids in PROMPTS], 20)
    return report, calls


def test_the_order_rotates_after_one_warm_up_each() -> None:
    _, calls = made_up_report()
    assert calls[:2] == [("slow", 1), ("fast", 1)]
    assert calls[2:] == [("slow", 1), ("fast", 1), ("fast", 2), ("slow", 2), ("slow", 3),
                         ("fast", 3)]  # fmt: skip


def test_totals_and_ratios() -> None:
    report, _ = made_up_report()
    slow, fast = report.results
    assert (slow.name, slow.tokens, slow.seconds) == ("slow", 40, 4.0), "the warm-up counts not"
    assert (fast.name, fast.tokens, fast.seconds) == ("fast", 40, 2.0)
    assert (slow.tokens_per_second, fast.tokens_per_second) == (10.0, 20.0)
    assert (report.ratio(slow), report.ratio(fast)) == (1.0, 2.0)
    assert fast.rates == [20.0, 20.0, 20.0]
    assert slow.rates == [10.0, 5.0, 20.0]
    assert report.median_ratio(fast) == 2.0, "of 2, 4 and 1"
    assert (slow.identical, fast.identical) == (3, 2)
    assert (report.num_prompts, report.max_new_tokens) == (3, 20)


def test_acceptance_is_weighted_by_steps() -> None:
    report, _ = made_up_report()
    slow, fast = report.results
    assert (slow.acceptance_length, slow.acceptance_by_depth) == (None, [])
    assert fast.num_steps == 20
    assert fast.acceptance_length == (40 - 3) / 20
    assert fast.acceptance_by_depth == pytest.approx([(3 + 2 + 3) / 20, 2 / 20, 1 / 20])


def test_a_report_as_json() -> None:
    report, _ = made_up_report()
    record = json.loads(json.dumps(report.as_dict()))
    assert [method["name"] for method in record["methods"]] == ["slow", "fast"]
    fast = record["methods"][1]
    assert (fast["ratio"], fast["median_ratio"], fast["tokens_per_second"]) == (2.0, 2.0, 20.0)
    assert fast["acceptance_length"] == (40 - 3) / 20
    assert fast["identical"] == 2


def test_the_median_stands_between_two_prompts() -> None:
    theirs, ours = MethodResult("a"), MethodResult("b")
    for seconds in (1.0, 1.0):
        theirs.add([1], seconds, None)
    for seconds in (1.0, 0.25):
        ours.add([1], seconds, None)
    assert BenchReport([theirs, ours], 2, 1).median_ratio(ours) == 2.5


def test_the_standard_methods_agree_on_a_tiny_model() -> None:
    base = tiny_base("llama")
    plain = build_engine(base)
    drafting = with_heads(plain, MedusaHeads.for_base(base, 2).requires_grad_(False))
    oracle = Oracle(tiny_base("llama"))
    assert len(standard_methods({"plain": plain}, oracle, 6)) == 3, "without heads nothing drafts"
    methods = standard_methods({"plain": plain, "ours": drafting, "two": drafting}, oracle, 6)
    assert list(methods) == ["transformers generate", "transformers prompt lookup",
                             "medusa-kit, one node", "ours", "two"]  # fmt: skip
    report = bench(methods, [[5, 6, 7, 5, 6, 7], [40, 41]], 6)
    assert [result.identical for result in report.results] == [2] * 5
    lengths = [result.acceptance_length for result in report.results]
    assert lengths[:3] == [None, None, 1.0]
    assert all(length is not None and length >= 1.0 for length in lengths[3:])
