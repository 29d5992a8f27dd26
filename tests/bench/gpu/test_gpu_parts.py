"""Parts of the first measurements and `doctor --gpu` on a stand-in for a CUDA device."""

from pathlib import Path

import pytest
import torch
from support.cuda_stand_in import Device

from benchmarks.gpu.attention import attention_parts
from benchmarks.gpu.captures import capture_part
from benchmarks.gpu.load import load_part
from benchmarks.gpu.memory import products_parts
from benchmarks.gpu.prompts import prompt_part
from benchmarks.gpu.steps import step_part
from benchmarks.gpu.workbench import LOOP, Workbench
from medusa_kit.bench.gpu.check import examine_gpu
from medusa_kit.bench.gpu.shapes import LLAMA_8B, tiny

TINY = tiny(LLAMA_8B)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def bench(cuda_stand_in: Device, tmp_path: Path) -> Workbench:
    return Workbench(CUDA, True, lambda name: {}, tmp_path)


def test_steps_on_the_device(bench: Workbench) -> None:
    """Captured ones are replays, and the host waits once a step, as in the loop."""
    captured, loop = (
        part.run(bench) for part in (step_part(TINY, 4), step_part(TINY, 4, mode=LOOP))
    )
    assert "in a CUDA graph" in captured["run_by"]
    assert captured["host_syncs"] == loop["host_syncs"] == 1
    assert "device_ms" in captured


def test_products_and_attention_are_captured(bench: Workbench, cuda_stand_in: Device) -> None:
    products = next(products_parts(TINY))
    with cuda_stand_in.counted() as counts:
        assert products.run(bench)["fused_ms"] is not None
    assert counts.captures == 2 * 10  # each with the one that keeps its memory
    (sdpa, *_) = [part for part in attention_parts(TINY) if "sdpa" in part.name]
    assert sdpa.run(bench)["captured"]


@pytest.mark.slow
def test_a_batch_on_the_device(bench: Workbench) -> None:
    found = capture_part(TINY).run(bench)
    assert (found["loose"], found["refused"]) == (0, None)
    assert found["forwards"] > 3
    load = load_part(TINY, 2, "medusa").run(bench)
    assert (load["loose_forwards"], load["answers"]) == (0, 2)
    assert prompt_part(TINY, 24, 512).run(bench)["by_default"] == 2048


def test_the_doctor_on_the_device(cuda_stand_in: Device) -> None:
    found = examine_gpu(CUDA, dry_run=True)
    assert found["captured"]
    assert "in a CUDA graph" in found["steps_run_by"]
    assert [one["host_syncs"] for one in found["steps"]] == [1, 1, 1]
