"""`make test` leaves out slow tests of folders that did not change, and says how many."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.slow_tests import SWITCH, changed_files, folders_of

CONFTEST = """
from support.slow_tests import SlowTests

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: over a second")
    config.pluginmanager.register(SlowTests(config.rootpath))
"""
TESTS = """
import pytest

def test_fast(): pass

@pytest.mark.slow
@pytest.mark.parametrize("case", [1, 2])
def test_slow(case): pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("tests/serve", "tests/infer/decode", "medusa_kit/serve"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("tests/serve", "tests/infer/decode"):
        (tmp_path / folder / f"test_{Path(folder).name}.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "All of it")
    return tmp_path


def git(project: Path, *command: str) -> None:
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *named, *command], cwd=project, check=True)


def ran(project: Path, asked: str = "changed") -> str:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n1", "tests"],
        env={**os.environ, "PYTHONPATH": path, SWITCH: asked}, cwd=project,
        capture_output=True, text=True,
    ).stdout  # fmt: skip


@pytest.mark.slow
def test_only_slow_tests_of_changed_folders_are_run(project: Path) -> None:
    assert "6 passed" in ran(project), "nothing has changed"
    git(project, "checkout", "-q", "-b", "work")
    (project / "medusa_kit/serve/new.py").touch()
    said = ran(project)
    assert "4 passed" in said
    assert "left out: 2 tests over a second. Of tests/serve, which changed, all ran" in said
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "New")
    assert "4 passed" in ran(project), "committed to a branch"
    assert "6 passed" in ran(project, asked="")


def test_what_has_changed(project: Path) -> None:
    assert changed_files(project) == []
    (project / "new.py").touch()
    (project / "pyproject.toml").write_text("")
    assert changed_files(project) == ["pyproject.toml", "new.py"]
    git(project, "checkout", "-q", "-b", "work")
    git(project, "commit", "-q", "-a", "-m", "Less")
    assert changed_files(project) == ["pyproject.toml", "new.py"]


def test_a_file_that_moved_changes_both_folders(project: Path) -> None:
    old, new = "tests/infer/decode/test_decode.py", "tests/serve/tést_moved.py"
    git(project, "mv", old, new)
    assert changed_files(project) == [old, new]
    git(project, "checkout", "-q", "-b", "work")
    git(project, "commit", "-q", "-a", "-m", "Moved")
    assert changed_files(project) == [old, new]


def test_without_a_common_commit_all_are_run(project: Path) -> None:
    """As in a shallow clone."""
    git(project, "checkout", "-q", "--orphan", "work")
    git(project, "commit", "-q", "-m", "Other")
    (project / "new.py").touch()
    assert changed_files(project) == []


def test_without_git_all_are_run(tmp_path: Path) -> None:
    assert changed_files(tmp_path) == []
    assert folders_of([], tmp_path) is None


@pytest.mark.parametrize(
    ("changed", "folders"),
    [
        (["medusa_kit/serve/app.py", "README.md"], {"serve"}),
        (["tests/serve/test_a.py"], {"serve"}),
        (["medusa_kit/infer/decode/text/a.py"], {"infer/decode"}),
        (["medusa_kit/errors.py"], {"."}),
        (["docs/page.md"], set()),
        (["benchmarks/rounds.py"], {"."}),  # there is no tests/bench here
        (["medusa_kit/serve/app.py", "constraints.txt"], None),
    ],
)
def test_folders_of_changed_files(
    project: Path, changed: list[str], folders: set[str] | None
) -> None:
    found = folders_of(changed, project / "tests")
    assert found == (None if folders is None else {Path(one) for one in folders})
