"""The measurement of the fused forward: what it writes, and that its cases run."""

import json
from pathlib import Path

import pytest
import torch
from support.attention_inputs import needs_triton

from benchmarks.fused_block.__main__ import Findings
from benchmarks.fused_block.models import random_family, random_trees
from medusa_kit.infer.device.fused_model import FAST


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_case_that_fails_is_a_line_and_the_next_one_runs(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "a.jsonl", minutes=1)
    findings.measure("first", lambda: {"value": 1 / 0})
    findings.measure("second", lambda: {"value": 2})
    first, second = lines_of(tmp_path / "a.jsonl")
    assert "ZeroDivisionError" in str(first["failed"])
    assert second["value"] == 2
    assert findings.num_failed == 1


def test_no_case_begins_once_time_is_up(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "a.jsonl", minutes=-1)
    findings.measure("late", lambda: {"value": 2})
    assert lines_of(tmp_path / "a.jsonl")[0]["left_out"] == "no time left"
    assert findings.num_failed == 0


@pytest.mark.parametrize("count", [1, 16, 64])
def test_random_trees_lie_in_order_of_depth(count: int) -> None:
    base = random_family("llama", torch.float32, tiny=True)
    (shape,) = random_trees(base, [count]).shapes
    depths = shape.depths_N.tolist()
    assert depths == sorted(depths)
    assert len(depths) == count


@pytest.mark.slow
@needs_triton
def test_logits_are_compared() -> None:
    from benchmarks.fused_block.bits import error

    found = error(random_family("gemma3", torch.float32, tiny=True), FAST, tiny=True)
    assert float(found["error"]) < 1e-4
    assert found["same_argmax"] == 1.0
    assert found["steps_run_by"] == "fused kernels, fixed shapes"
