"""Fixtures of the command line's tests."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.debug_model import MODEL, ROOT

from medusa_kit import cli, console

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command through `main`: (exit code, stdout, stderr)."""
    monkeypatch.setattr(console.out, "width", 160)
    monkeypatch.setattr(console.err, "width", 160)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["medusa-kit", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return (code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("Name a tree.\nCount to three.\nSay hello.\n")
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, prompts: Path) -> Path:
    """A folder of trained heads with statistics and a tree, by the commands themselves."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        for arguments in (
            ["train", ROOT / "recipes/debug.yaml", f"output_dir={folder}", "train.epochs=3",
             "deepspeed.enabled=false", "base.device=cpu"],
            ["tree-search", *MODEL, "--heads", folder / "heads", "--prompts", prompts, "-n", "16",
             "--sizes", "1,2,4"],
        ):  # fmt: skip
            patch.setattr(sys, "argv", ["medusa-kit", *map(str, arguments)])
            with pytest.raises(SystemExit) as leaving:
                cli.main()
            assert not leaving.value.code
    return folder / "heads"
