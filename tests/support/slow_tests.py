"""Which tests over a second (marked `slow`) are run: all, or where MEDUSA_KIT_SLOW=changed those of
folders that differ from the main branch.

A folder of tests is that of a package, so a change in medusa_kit/serve/ asks for tests/serve/.
"""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import pytest

SWITCH = "MEDUSA_KIT_SLOW"
BASES = ("origin/HEAD", "origin/main", "main")
FOR_ALL = frozenset({"pyproject.toml", "constraints.txt", "setup.py"})
FOLDERS = {"medusa_kit": "", "tests": "", "benchmarks": "bench"}


def changed_files(root: Path) -> list[str]:
    """Files that differ from the main branch, new ones and old names too; none where there is no
    git, or not enough of the history."""
    try:
        known = (base for base in BASES if _git(root, "rev-parse", "-q", "--verify", base))
        base = next(known, "HEAD")
        if not (since := _git(root, "merge-base", base, "HEAD")):
            return []
        differ = _git(root, "diff", "--name-only", "--no-renames", *since)
        return differ + _git(root, "ls-files", "--others", "--exclude-standard")
    except OSError:
        return []


def _git(root: Path, *command: str) -> list[str]:
    """The lines that git prints; none where it fails."""
    done = subprocess.run(
        ["git", "--no-optional-locks", "-c", "core.quotePath=off", "-C", root, *command],
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def folders_of(files: Iterable[str], tests: Path) -> set[PurePath] | None:
    """The folders below `tests` for these files; None: all of them."""
    names = [PurePath(name) for name in files]
    if not names or any(str(name) in FOR_ALL for name in names):
        return None
    found = set()
    for name in names:
        if (top := name.parts[0]) in FOLDERS:
            folder = PurePath(FOLDERS[top] or PurePath(*name.parts[1:-1]))
            found.add(next(one for one in (folder, *folder.parents) if (tests / one).is_dir()))
    return found


class SlowTests:
    """A pytest plugin that leaves slow tests out and says how many."""

    def __init__(self, root: Path) -> None:
        self.tests, self.left = root / "tests", 0
        asked = os.environ.get(SWITCH) == "changed"
        self.folders = folders_of(changed_files(root), self.tests) if asked else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        if self.folders is None:
            return
        left = [one for one in items if one.get_closest_marker("slow") and not self._runs(one)]
        items[:] = [one for one in items if one not in left]
        self.left = len(left)
        if hasattr(config, "workeroutput"):  # a process of pytest-xdist
            config.workeroutput["left"] = self.left
        config.hook.pytest_deselected(items=left)

    def _runs(self, item: pytest.Item) -> bool:
        """A folder's tests are those inside it too, but for `tests` itself."""
        folder = PurePath(item.path.relative_to(self.tests)).parent
        within = {one for one in folder.parents if one.parts}
        return not (within | {folder}).isdisjoint(self.folders or ())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """All processes collect the same tests."""
        self.left = getattr(node, "workeroutput", {}).get("left", self.left)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left:
            ran = ", ".join(sorted(f"tests/{one}" for one in self.folders or ())) or "no folder"
            terminalreporter.write_line(
                f"left out: {self.left} tests over a second. Of {ran}, which changed, all ran; "
                "`make test ALL=1` runs everything"
            )
