"""The files by which a host, a package index and a newcomer know the project say what is true."""

import contextlib
import os
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from medusa_kit import installing
from medusa_kit.version import __version__

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))  # config.yml is none
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INPUTS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}  # of an issue form
PATH = re.compile(r"\b(?:docs|recipes|tests|medusa_kit)/[\w./-]*\w|\b[A-Z_]+\.md\b|\.ci/run\b")


def parsed(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_workflow_runs_what_runs_by_hand() -> None:
    """Each step is an action or a file that is there and may be executed."""
    jobs = parsed(".github/workflows/ci.yml")["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    commands = [shlex.split(step["run"])[0] for step in steps if "run" in step]
    assert commands == [".ci/run"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)
    assert all("@" in step["uses"] for step in steps if "run" not in step)


def test_issue_forms_are_forms() -> None:
    names = [path.stem for path in FORMS]
    assert names == ["bug", "model_support", "question"]
    assert set(parsed(".github/ISSUE_TEMPLATE/config.yml")) == {"blank_issues_enabled"}
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert {part["type"] for part in form["body"]} <= INPUTS
        asked = [part for part in form["body"] if part["type"] != "markdown"]
        ids = [part["id"] for part in asked]
        assert len(ids) == len(set(ids)) > 0
        assert all(part["attributes"]["label"] for part in asked)
        assert any(part.get("validations", {}).get("required") for part in asked)


def test_hooks_use_the_tools_of_the_environment() -> None:
    """Local ones alone, which fetch nothing, and those of `make check`."""
    (source,) = parsed(".pre-commit-config.yaml")["repos"]
    assert source["repo"] == "local"
    assert {hook["language"] for hook in source["hooks"]} == {"system"}
    makefile = (ROOT / "Makefile").read_text()
    for hook in source["hooks"]:
        tool = hook["entry"].removeprefix(".venv/bin/")
        assert f"$(BIN)/{tool}" in makefile


def test_the_citation_is_of_this_version() -> None:
    citation = parsed("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == __version__
    assert citation["title"] == PROJECT["name"]
    assert citation["license"] == PROJECT["license"]


def test_no_text_names_a_package_index_or_an_address_that_is_not_there() -> None:
    """Nobody can install `medusa-kit` by that name, and anybody could register it."""
    code = [path for name in ("medusa_kit", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    texts = [ROOT / "pyproject.toml", *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *code]
    wrong = re.compile(r"pip install (-U |--upgrade )?['\"]?medusa-kit|https?://example\.")
    assert not [path for path in texts if wrong.search(path.read_text())]


def test_hints_name_extras_that_are_there() -> None:
    used = set[str]()
    for path in (*(ROOT / "medusa_kit").rglob("*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"):
        text = path.read_text()
        used.update(re.findall(r"\bextra\([\"'](\w+)[\"']\)", text))
        used.update(",".join(re.findall(r"-e '\.\[([\w,]+)\]'", text)).split(","))
    assert used - {""} <= PROJECT["optional-dependencies"].keys()
    assert {"train", "serve", "gguf"} <= used
    assert installing.extra("serve").startswith("pip install -e '.[serve]' ")


def test_no_source_names_a_package_that_no_index_has() -> None:
    named = re.compile(r"medusa[-_]kit\[|pip install medusa")
    sources = [path for path in (ROOT / "medusa_kit").rglob("*") if path.suffix in (".py", ".html")]
    assert [str(path) for path in sources if named.search(path.read_text())] == []


def test_the_address_is_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installing.from_nothing() == ["make install && . .venv/bin/activate"]
    monkeypatch.setattr(installing, "ADDRESS", "https://host.invalid/kit")
    assert installing.from_nothing()[0].startswith("git clone https://host.invalid/kit ")


def test_every_python_that_is_promised_is_promised_everywhere() -> None:
    versions = [one.rpartition(" ")[2] for one in PROJECT["classifiers"]
                if re.search(r"Python :: 3\.", one)]  # fmt: skip
    assert PROJECT["requires-python"] == f">={versions[0]}"
    makefile = (ROOT / "Makefile").read_text()
    assert f"PYTHONS := {' '.join(versions)}\n" in makefile
    assert (
        f"Python {', '.join(versions[:-1])} or {versions[-1]}" in (ROOT / "README.md").read_text()
    )
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["target-version"]
    assert target == f"py{versions[0].replace('.', '')}"


def test_what_is_pinned_takes_every_python_that_is_promised() -> None:
    """`make resolve` asks the index; this asks what is installed here."""
    names = [line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
             if "==" in line]  # fmt: skip
    versions = [one.rpartition(" ")[2] for one in PROJECT["classifiers"]
                if re.search(r"Python :: 3\.", one)]  # fmt: skip
    seen = 0
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            required = SpecifierSet(metadata.metadata(name).get("Requires-Python") or "")
            assert [one for one in versions if f"{one}.99" in required] == versions, name
            seen += 1
    assert seen > 30


def test_the_changelog_keeps_its_form() -> None:
    """https://keepachangelog.com: versions, and in each the kinds of changes in their order."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line for line in lines if line.startswith("## ")]
    assert versions[0] == "## [Unreleased]"
    released = re.compile(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d")
    assert all(released.fullmatch(line) for line in versions[1:])
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for part in "\n".join(lines).split("\n## ")[1:]:
        there = re.findall(r"^### (.+)$", part, re.MULTILINE)
        assert there == [kind for kind in kinds if kind in there]
        before = part.split("\n### ")[0]
        assert "\n- " not in before, "a change stands below its kind"


@pytest.mark.parametrize("path", [
    *FORMS, *(ROOT / name for name in (".github/pull_request_template.md", "SECURITY.md",
                                       "CODE_OF_CONDUCT.md", "CONTRIBUTING.md")),
], ids=lambda path: path.name)  # fmt: skip
def test_files_that_are_named_are_there(path: Path) -> None:
    named = PATH.findall(path.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_classifiers_agree_with_the_rest() -> None:
    classifiers = PROJECT["classifiers"]
    assert len(classifiers) == len(set(classifiers))
    assert not [one for one in classifiers if one.startswith("License ::")], "`license` says it"
    lowest = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    versions = [tuple(map(int, one.rpartition(" ")[2].split("."))) for one in classifiers
                if re.search(r"Python :: 3\.", one)]  # fmt: skip
    assert versions
    assert all(version >= lowest for version in versions)
    known = pytest.importorskip("trove_classifiers").classifiers
    assert set(classifiers) <= known
