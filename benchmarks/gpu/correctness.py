"""The tests that need a GPU, by pytest in a process of its own."""

import importlib.util
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import ROOT
from benchmarks.gpu.runner import Part
from benchmarks.gpu.workbench import Workbench
from medusa_kit.errors import MedusaKitError

TESTS = "tests/infer/test_gpu.py"
LIMIT_SECONDS, DRY_SECONDS, TO_REPORT_SECONDS = 150.0, 600.0, 20.0
NAMED = 5


def suite(bench: Workbench) -> dict[str, Any]:
    """Raises MedusaKitError where a test fails; junit.xml and pytest.txt have the details.

    Warnings are no errors here: other versions of torch have others. Each test is named as it
    ends, so that a run that is stopped from outside tells which have failed.
    """
    report, said = bench.folder / "junit.xml", bench.folder / "pytest.txt"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", TESTS, "-v", "-W", "default", "-rs", "--tb=short",
               f"--junit-xml={report.resolve()}", "-p", "no:cacheprovider"]  # fmt: skip
    if not bench.small and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, (os.cpu_count() or 2) // 2))]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command += ["--timeout", "60"]
    stopped = _run(command, said, DRY_SECONDS if bench.small else LIMIT_SECONDS)
    if not report.is_file():
        raise MedusaKitError(f"pytest wrote no report: {said.read_text().strip()[-200:]}")
    return {**counted(report), "stopped": stopped}


def _run(command: list[str], said: Path, seconds: float) -> bool:
    """Whether it had to be stopped: as by Ctrl+C, so that pytest reports what it has done."""
    with (
        said.open("w", encoding="utf-8") as output,
        subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(TO_REPORT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            return True
    return False


def counted(report: Path) -> dict[str, int]:
    """Raises MedusaKitError where a test of pytest's report has failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    found = {kind: [_name(one) for one in cases if one.find(kind) is not None]
             for kind in ("failure", "error", "skipped")}  # fmt: skip
    wrong = [*found["failure"], *found["error"]]
    passed = len(cases) - len(wrong) - len(found["skipped"])
    if wrong or not cases:
        told = f"{len(wrong)} of {len(cases)} tests failed ({passed} passed)"
        raise MedusaKitError(f"{told}: {', '.join(wrong[:NAMED])}")
    return {"tests": len(cases), "passed": passed, "skipped": len(found["skipped"])}


def _name(case: ElementTree.Element) -> str:
    return str(case.get("name"))


def suite_part() -> Part:
    return Part("tests on the device", "tests", suite, 30.0)
