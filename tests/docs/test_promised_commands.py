"""The documents, `make demo` and `train --quick` only promise commands that exist."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_kit.cli import app
from medusa_kit.settings.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^(?:\$ )?medusa-kit (.+?)(?:\s{2,}.*|\s+#.*)?$", re.MULTILINE)


def commands() -> list[str]:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.findall(r"^\t\$\(BIN\)/(?:python -m medusa_kit|medusa-kit) (.+)$", makefile, re.M)
    assert any(line.startswith("train --quick") for line in found)
    found = [line.replace("$(DEMO_HOURS)", "0.13") for line in found if "$(" not in line or
             "$(DEMO_HOURS)" in line]  # fmt: skip
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


def test_an_unknown_option_would_be_seen() -> None:
    assert CliRunner().invoke(app, ["chat", "--no-such-option", "--help"]).exit_code == 2


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda p: p.name)
def test_every_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path, [])
    assert recipe.output_dir
    assert path.read_text().startswith("# "), "a recipe begins with what it needs"
