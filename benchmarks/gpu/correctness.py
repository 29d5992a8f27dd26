"""The tests that need a GPU, by pytest in a process of its own."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

from benchmarks.gpu.processes import ROOT
from benchmarks.gpu.runner import Part
from benchmarks.gpu.workbench import Workbench
from medusa_kit.errors import MedusaKitError

TESTS = "tests/infer/test_gpu.py"
LIMIT_SECONDS, DRY_SECONDS = 240.0, 600.0
NAMED = 5


def suite(bench: Workbench) -> dict[str, Any]:
    """Raises MedusaKitError where a test fails; junit.xml and pytest.txt have the details.

    Warnings are no errors here: other versions of torch have others.
    """
    report, said = bench.folder / "junit.xml", bench.folder / "pytest.txt"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", TESTS, "-W", "default", "-rs", "--tb=short",
               f"--junit-xml={report.resolve()}", "-p", "no:cacheprovider"]  # fmt: skip
    limit = DRY_SECONDS if bench.small else LIMIT_SECONDS
    with said.open("w", encoding="utf-8") as output:
        try:
            subprocess.run(command, cwd=ROOT, env=os.environ, stdout=output,
                           stderr=subprocess.STDOUT, timeout=limit, check=False)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise MedusaKitError(f"they took more than {limit:.0f} s") from error
    if not report.is_file():
        raise MedusaKitError(f"pytest wrote no report: {said.read_text().strip()[-200:]}")
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
