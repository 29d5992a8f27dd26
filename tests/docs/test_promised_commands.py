"""The documents, the Makefile and `train --quick` only promise commands that exist."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_kit.cli import app
from medusa_kit.settings.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^(?:\$ )?medusa-kit (.+?)(?:\s{2,}.*|\s+#.*)?$", re.MULTILINE)


def commands() -> list[str]:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.findall(r"^\t\$\(BIN\)/(?:python -m medusa_kit|medusa-kit) (.+)$", makefile, re.M)
    assert "bench" in found
    found = [line for line in found if "$(" not in line]
    for page in PAGES:
        for block in re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(), re.DOTALL | re.M):
            found += COMMAND.findall(block)
    return found


@pytest.mark.parametrize("line", commands())
def test_command_and_options_exist(line: str) -> None:
    """Parsed with --help after it: an unknown command or option is still an error."""
    arguments = [part for part in shlex.split(line) if part not in ("...", "[...]")]
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0, result.output


def test_modules_that_make_runs_exist() -> None:
    found = re.findall(r"-m (medusa_kit\.[\w.]+)", (ROOT / "Makefile").read_text())
    assert "medusa_kit.demo" in found
    for name in found:
        assert importlib.util.find_spec(f"{name}.__main__"), name


def test_an_unknown_option_would_be_seen() -> None:
    assert CliRunner().invoke(app, ["chat", "--no-such-option", "--help"]).exit_code == 2


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda p: p.name)
def test_every_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path, [])
    assert recipe.output_dir
    assert path.read_text().startswith("# "), "a recipe begins with what it needs"
