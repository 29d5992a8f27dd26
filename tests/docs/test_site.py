"""The docs build as a site without a warning, and its reference has every command and key."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.debug_model import ROOT

from medusa_kit.settings.recipe import TrainRecipe


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """In a copy, since pages of the reference are written beside the others."""
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-b", "html", "docs", "site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    commands = (docs / "reference/commands.md").read_text()
    assert {"chat", "train", "data inspect", "tree-search"} <= set(
        re.findall(r"^#+ `medusa-kit ([a-z -]+)`$", commands, re.M)
    )
    keys = re.findall(r"^\| `(\w+)`", (docs / "reference/recipes.md").read_text(), re.M)
    sections = [field.annotation for field in TrainRecipe.model_fields.values()]
    named = {name for one in sections for name in getattr(one, "model_fields", ())}
    assert named - {"offload"} <= set(keys)
    assert (tmp_path / "site/index.html").is_file()


def test_variables_of_ours_have_a_row() -> None:
    """Those that the package reads are on the page, and those on the page are read."""
    sources = [ROOT / "setup.py", *(ROOT / "medusa_kit").rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    read = set(re.findall(r'"(MEDUSA_KIT_\w+)"', text)) - {
        "MEDUSA_KIT_LAUNCHER"
    }  # set by `--nproc`
    page = (ROOT / "docs/environment.md").read_text()
    assert set(re.findall(r"^\| `(MEDUSA_KIT_\w+)`", page, re.M)) == read
