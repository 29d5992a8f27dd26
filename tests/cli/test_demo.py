"""The demo and the README only promise commands that exist."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_kit.cli import app, demo
from medusa_kit.settings.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^(?:\$ )?medusa-kit (.+?)(?:\s{2,}.*|\s+#.*)?$", re.MULTILINE)


def commands() -> list[str]:
    found = [shlex.join(arguments) for _, arguments in demo.steps()]
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


def test_the_demo_trains_where_its_bench_looks() -> None:
    recipe = load_recipe(ROOT / demo.RECIPE, [])
    assert Path(recipe.output_dir) == demo.FOLDER / "run"
    assert any(f"{recipe.output_dir}/heads" in argument for _, step in demo.steps()
               for argument in step)  # fmt: skip
