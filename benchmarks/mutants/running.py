"""Runs the tests of each mutant in a copy of a tree, and keeps what became of it.

A copy has the tree's files as they are, those that git ignores left out. Tests have caches and
compiled kernels of their own, since a mutant may write what the next one would read.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.mutants.drawing import Mutant
from benchmarks.mutants.placing import place
from medusa_kit import console
from medusa_kit.errors import MedusaKitError
from medusa_kit.files import atomic_write

PASSED, FAILED = 0, 1  # pytest's exit codes
LONGER = 3.0  # a mutant's tests hang where they take so many times what they take without it
LEAST_SECONDS = 120.0
SHOWN = 300  # characters


@contextmanager
def copied(tree: Path) -> Any:
    """A copy of what git knows or would add, which is removed afterwards."""
    listed = subprocess.run(
        ["git", "-C", str(tree), "ls-files", "-co", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in listed:
            if (tree / name).is_file():
                to = Path(folder, name)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, to)
        yield Path(folder)


def run_tests(copy: Path, tests: Sequence[str], native: bool, seconds: float | None) -> Any:
    """(exit code, or None for a hang; the last line)."""
    with tempfile.TemporaryDirectory(prefix="mutant-cache-") as cache:
        own = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "MEDUSA_KIT_CACHE": cache,
               "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        if native:
            own |= {"MEDUSA_KIT_ISA": "avx2", "TORCH_EXTENSIONS_DIR": cache}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        process = subprocess.Popen(
            command, cwd=copy, env={**os.environ, **own}, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            return None, "a hang"
        finally:
            with_children(process)
    return process.returncode, (output.strip().splitlines() or [""])[-1][:SHOWN]


def with_children(process: subprocess.Popen[str]) -> None:
    """Ends what a hanging or broken run left: its session is its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def here(copy: Path, tests: Sequence[str]) -> list[str]:
    """Those of the tests that there are, also where a file was moved: basenames are unique."""
    found = []
    for name in tests:
        moved = sorted((copy / "tests").rglob(Path(name).name))
        found += [name] if (copy / name).is_file() else [str(p.relative_to(copy)) for p in moved]
    return found


class Run:
    """What was found in one tree, saved after each mutant, and read where a run goes on."""

    def __init__(self, tree: Path, output: Path) -> None:
        self.tree, self.output = tree, output
        self.found: dict[str, Any] = {}
        self.unchanged: dict[str, float] = {}  # group -> seconds of its tests
        if output.is_file():
            self.found = json.loads(output.read_text(encoding="utf-8"))["mutants"]

    def of(self, mutants: Sequence[Mutant]) -> None:
        """Raises MedusaKitError where tests fail without any mutant."""
        with copied(self.tree) as copy:
            left = [one for one in mutants if str(one.number) not in self.found]
            for mutant in left:
                self.found[str(mutant.number)] = said = self._one(mutant, copy)
                self.save()
                console.note(f"{mutant.number} {mutant.file} {mutant.function}: {said['state']}")

    def _one(self, mutant: Mutant, copy: Path) -> dict[str, Any]:
        tests, placed = here(copy, mutant.tests), place(mutant, copy)
        if placed is None or not tests:
            return {"state": "not found", "why": "the line" if placed is None else "its tests"}
        native = not mutant.file.endswith(".py")
        if mutant.group not in self.unchanged:
            names = {Path(name).name for name in tests}
            if gone := [name for name in mutant.tests if Path(name).name not in names]:
                console.note(f"{mutant.group}: without {', '.join(gone)}, which this tree lacks")
            start = time.monotonic()
            code, last = run_tests(copy, tests, native, None)
            if code != PASSED:
                raise MedusaKitError(f"{' '.join(tests)} fail without a mutant: {last}")
            self.unchanged[mutant.group] = time.monotonic() - start
        own, limit = placed.path.read_bytes(), LONGER * self.unchanged[mutant.group]
        start = time.monotonic()
        try:
            placed.path.write_text(placed.text, encoding="utf-8")
            code, last = run_tests(copy, tests, native, max(limit, LEAST_SECONDS))
        finally:
            placed.path.write_bytes(own)
        state = "survived" if code == PASSED else "killed"
        place_now = f"{placed.path.relative_to(copy)}:{placed.line}"
        return {"state": state, "at": place_now, "last_line": last,
                "seconds": round(time.monotonic() - start, 1)}  # fmt: skip

    def save(self) -> None:
        ordered = dict(sorted(self.found.items(), key=lambda one: int(one[0])))
        with atomic_write(self.output) as path:
            text = json.dumps({"mutants": ordered}, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")
