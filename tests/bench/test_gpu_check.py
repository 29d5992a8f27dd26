"""The check of the kernels without a device: its quick part, its limits and its exit codes."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import kernels
from benchmarks.gpu_check.compiling import Resources
from benchmarks.gpu_check.report import Report
from medusa_kit.infer.attention import triton_backend

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `triton`)"
)


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`main` sets these for the processes that it starts."""
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@needs_triton
def test_the_quick_part_compiles_what_has_failed_before(tmp_path: Path) -> None:
    """In a process of its own: here kernels are interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "kernels", "--quick", "--json"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["kernels"]["rows"]
    targets = {(row["kernel"], row["target"]) for row in rows}
    assert targets == {(kernel, t) for kernel in ("split", "merge") for t in (89, 90, 100, 120)}
    for row in rows:
        assert 16 < row["resources"]["registers"] < 256
        if row["kernel"] == "split" and row["case"]["dtype"] == "bfloat16":
            assert row["resources"]["products"] in ("mma", "wgmma", "tcgen05")


@pytest.mark.slow
@needs_triton
def test_the_fused_kernels_compile_for_four_generations(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "fused", "--quick", "--json"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["fused"]["rows"]
    assert {row["target"] for row in rows if row["kernel"] == "tail"} == {80, 89, 90, 100}
    assert {row["kernel"] for row in rows} == {
        "places", "add_norm", "product", "rope", "prefix", "tail", "activation"
    }  # fmt: skip
    for row in rows:
        if row["kernel"] in ("product", "prefix", "tail") and row["dtype"] == "bfloat16":
            assert row["resources"]["products"] in ("mma", "wgmma", "tcgen05")
            assert row["resources"]["stack"] == 0


@needs_triton
def test_sizes_of_trees_and_caches_compile_nothing_of_their_own() -> None:
    """From one tile of rows on: several words of ancestors, ragged tiles, any number of nodes."""
    case = kernels.Case("bfloat16", 128, 128, 16)
    sizes = [replace(case, nodes=nodes) for nodes in (16, 17, 63, 130, 200)]
    assert len(kernels._jobs((90, one) for one in sizes)) == 2  # one that splits, one that merges
    others = [replace(case, nodes=1), replace(case, window=True), replace(case, head_size=64)]
    assert len(kernels._jobs((90, one) for one in (case, *others))) == 5


FINE = kernels.Finding(
    "split", 89, kernels.Case("bfloat16", 64, 64, 16), 64, 4, Resources(200, 0, 99 << 10, "mma")
)


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, None),
        ({"stack": 8}, "8 bytes spilled a thread"),
        ({"shared": (99 << 10) + 16}, "101392 bytes of shared memory, the device has 101376"),
        ({"products": None}, "no product uses the tensor cores"),
    ],
)
def test_a_limit_that_is_missed(changed: dict, missed: str | None) -> None:
    finding = replace(FINE, resources=replace(FINE.resources, **changed))
    told = kernels.misses(finding)
    assert len(told) == bool(missed)
    if missed:
        assert told[0].startswith("split bf16 64 by 64, sm89: ")
        assert missed in told[0]
    wide = replace(finding, case=replace(FINE.case, dtype="float32"))
    assert bool(kernels.misses(wide)) is ("shared" in changed)
    assert not kernels.misses(replace(finding, target=90)) or "shared" not in changed


def test_a_miss_is_exit_code_1(
    own_environment: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("Title", ["kernel", "sm90"], [["one", "12"]], [{"name": "one"}], [])
    for misses in ([], ["one spills"]):
        part = SimpleNamespace(check=lambda quick, m=misses: replace(report, misses=m))
        monkeypatch.setitem(sys.modules, "a_part", part)
        monkeypatch.setattr(gpu_check, "PARTS", {"kernels": "a_part"})
        assert gpu_check.main([]) == len(misses)
        shown = capsys.readouterr()
        assert "Title" in shown.out
        assert shown.err == "".join(f"missed: {miss}\n" for miss in misses)
        assert gpu_check.main(["--json", "kernels"]) == len(misses)
        data = json.loads(capsys.readouterr().out)
        assert data == {"kernels": {"rows": [{"name": "one"}], "misses": misses}}


def test_what_cannot_be_checked_is_an_error(
    own_environment: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(["kernel"])
    assert caught.value.code == 2
    assert "unknown part 'kernel'; expected some of kernels" in capsys.readouterr().err
    monkeypatch.setattr(triton_backend, "missing", lambda: ("triton is not installed", "triton"))
    assert gpu_check.main(["kernels"]) == 1
    assert "'.[triton]'" in capsys.readouterr().err
