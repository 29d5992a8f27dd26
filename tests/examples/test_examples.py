"""The examples run as they stand, on the embedded model or a tiny one. `openai_client.py` runs in
tests/serve/."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.debug_model import ROOT

EXAMPLES = ROOT / "examples"
SAID = {
    "python_api": "the same without drafting: True",
    "structured_output": "{'city': ",
    "transformers_generate": "the same tokens: True",
    "own_drafter": "the same text: True",
}
TINY = {"transformers_generate"}  # which loads the embedded model's weights a second time


def run(command: list[str], folder: Path, **variables: str) -> str:
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join([scripts, os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": path, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_python(name: str, tmp_path: Path) -> None:
    model = ["debug-tiny"] if name in TINY else []
    assert SAID[name] in run([sys.executable, str(EXAMPLES / f"{name}.py"), *model], tmp_path)


@pytest.mark.slow
def test_an_adapter_with_its_heads(tmp_path: Path) -> None:
    run(["sh", str(EXAMPLES / "adapter_with_heads.sh")], tmp_path, OUT="made")
    assert (tmp_path / "made/adapted/adapter/medusa_heads").is_dir()


@pytest.mark.slow
def test_quick_training(tmp_path: Path) -> None:
    script = str(EXAMPLES / "quick_training.sh")
    run(["sh", script, "debug-tiny"], tmp_path, OUT="made", HOURS="0.005")
    assert (tmp_path / "made/heads/report.md").is_file()


def test_each_has_a_row() -> None:
    page = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir()} - {"README.md"}
    assert all(f"[{name}]({name})" in page for name in files)
