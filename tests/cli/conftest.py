"""Fixtures of the command line's tests."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checked_once import checked_once  # noqa: F401
from support.debug_model import MODEL, ROOT
from support.typed import typed_command

from medusa_kit import cli, console

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command through `main`: (exit code, stdout, stderr)."""
    monkeypatch.setattr(console.out, "width", 160)
    monkeypatch.setattr(console.err, "width", 160)

    return typed_command(monkeypatch, capsys)


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


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """Makes stdout and stderr one terminal of so many columns."""

    def open_terminal(width: int) -> Terminal:
        screen = Terminal(width)
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        for one in (console.out, console.err):
            monkeypatch.setattr(one, "width", width)
            monkeypatch.setattr(one, "no_color", False)
            monkeypatch.setattr(one, "is_interactive", True)
        return screen

    return open_terminal


TOKEN = re.compile(r"\x1b(?:\[(?P<parameters>[?\d;]*)(?P<final>[A-Za-z])|(?P<short>[78]))|.", re.S)


class Terminal(io.StringIO):
    """What a person sees of stdout and stderr, `width` columns wide, after control sequences have
    done their work. It never scrolls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.row, self.column, self.style = width, 0, 0, ""
        self.cells: dict[tuple[int, int], tuple[str, str]] = {}  # place -> (character, style)
        self._saved = (0, 0, "")

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for token in TOKEN.finditer(text):
            if token["final"]:
                self._control(token["parameters"], token["final"])
            elif token["short"] == "7":
                self._saved = self.row, self.column, self.style
            elif token["short"] == "8":
                self.row, self.column, self.style = self._saved
            else:
                self._put(token[0])
        return len(text)

    def _put(self, character: str) -> None:
        if character == "\n":
            self.row, self.column = self.row + 1, 0
        elif character == "\r":
            self.column = 0
        else:
            cells = 2 if character > "\u2e80" else 1
            if self.column + cells > self.width:
                self.row, self.column = self.row + 1, 0
            self.cells[self.row, self.column] = character, self.style
            self.column += cells

    def _control(self, parameters: str, final: str) -> None:
        if final == "m":
            self.style = "" if parameters in ("", "0") else parameters
        elif final == "A":
            self.row -= int(parameters or 1)
        elif final in "JK":
            here = (self.row, 0 if parameters == "2" else self.column)
            until = (self.row + 1, 0) if final == "K" else (1 << 30, 0)
            self.cells = {at: c for at, c in self.cells.items() if not here <= at < until}
        else:
            assert parameters.startswith("?"), f"this terminal knows no CSI {parameters}{final}"

    def resize(self, width: int) -> None:
        """Breaks the first line, below which nothing stands, anew. The cursor moves with its text;
        the place that was saved does not."""
        line = {row * self.width + column: c for (row, column), c in self.cells.items()}
        at = self.row * self.width + self.column
        self.width, self.cells = width, {divmod(place, width): c for place, c in line.items()}
        self.row, self.column = divmod(at, width)

    @property
    def lines(self) -> list[str]:
        """What stands on the screen, ends of lines without spaces, without empty lines below."""
        rows = 1 + max((row for row, _ in self.cells), default=-1)
        return ["".join(self.cells.get((row, column), (" ",))[0] for column in range(self.width))
                .rstrip() for row in range(rows)]  # fmt: skip

    def style_of(self, text: str) -> str:
        """The style of the first place where `text` stands."""
        for row, line in enumerate(self.lines):
            if (column := line.find(text)) >= 0:
                return self.cells[row, column][1]
        raise AssertionError(f"{text!r} is not on the screen: {self.lines}")
