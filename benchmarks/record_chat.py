"""Record a real chat as an animated SVG.

    make recording        # or: python benchmarks/record_chat.py docs/images/chat.svg [--seed 1]

Runs `medusa-kit chat` with the embedded model in a terminal of its own, types into it, and keeps
what stands on the screen with the time at which it came there. Only the typing is made up. The
recording starts when the model is loaded. Needs pyte, which `make recording` installs.
"""

import argparse
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

from terminal_svg import Cell, animated

from medusa_kit.files import atomic_write

try:
    import pyte
except ImportError:
    pyte = None

COLUMNS, ROWS = 100, 44
KEY_SECONDS, THINK_SECONDS, LAST_SECONDS = 0.045, 0.7, 5.0  # of the typing, and before it repeats
FRAME_SECONDS = 0.03  # screens that stand for less are left out
LOAD_SECONDS, ANSWER_SECONDS = 300.0, 120.0
LARGEST = 100_000  # bytes
LINES = [
    "What is a river?",
    "Write a Python function that returns the largest of three numbers.",
]


class Recorder:
    """A program in a terminal, and the life of each character on the screen."""

    def __init__(self, command: list[str]) -> None:
        process, self.terminal = pty.fork()
        if process == 0:
            os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
            os.execvp(command[0], command)
        self.process = process
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.shown: dict[tuple[int, int], tuple[str, str, float]] = {}  # place: text, style, born
        self.gone: list[Cell] = []

    def until(self, reached: Callable[[], bool], limit: float) -> None:
        """Follow the program until the screen is as wanted and stays so for a frame."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if select.select([self.terminal], [], [], FRAME_SECONDS)[0]:
                self._read()
            else:
                self.frame()
                if reached():
                    return
        raise SystemExit(f"the chat did not come that far in {limit:.0f} s:\n{self.text()}")

    def _read(self) -> None:
        data = os.read(self.terminal, 65536)
        self.stream.feed(data.replace(b"\x1b[2m", b"\x1b[90m"))  # pyte knows no dim text
        if time.monotonic() - self.last_frame >= FRAME_SECONDS:
            self.frame()

    def frame(self) -> None:
        """Note what has come and gone since the last frame."""
        now = self.last_frame = time.monotonic()
        cells = {
            (row, column): (cell.data, cell.fg)
            for row, line in self.screen.buffer.items()
            for column, cell in line.items()
            if cell.data.strip()
        }
        for place, (text, style, born) in list(self.shown.items()):
            if cells.get(place) != (text, style):
                self.gone.append(Cell(*place, text, style, born, now))
                del self.shown[place]
        for place, (text, style) in cells.items():
            self.shown.setdefault(place, (text, style, now))

    last_frame = 0.0

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).strip()

    def at_prompt(self) -> bool:
        return self.text().endswith("\n›") and self.screen.cursor.x == 2

    def type(self, line: str) -> None:
        for key in line:
            os.write(self.terminal, key.encode())
            self.until(lambda: True, KEY_SECONDS * 100)
            time.sleep(KEY_SECONDS)
        os.write(self.terminal, b"\n")


def record(command: list[str]) -> tuple[list[Cell], float]:
    """The cells of a session, and when it ended; seconds from when the model was loaded."""
    chat = Recorder(command)
    chat.until(chat.at_prompt, LOAD_SECONDS)
    start = time.monotonic()
    for line in LINES:
        time.sleep(THINK_SECONDS)
        chat.type(line)
        before = chat.text().count("›")
        chat.until(lambda: chat.at_prompt() and chat.text().count("›") > before, ANSWER_SECONDS)  # noqa: B023
    end = time.monotonic()
    os.write(chat.terminal, b"/exit\n")
    os.waitpid(chat.process, 0)
    standing = [Cell(*place, *cell, None) for place, cell in chat.shown.items()]
    cells = [one for one in chat.gone if one.died and one.died > start] + standing
    return [one.moved(-start) for one in cells], end - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=120)
    given = parser.parse_args()
    if pyte is None:
        raise SystemExit("pyte is not installed; `make recording` installs it and runs this")
    command = [sys.executable, "-m", "medusa_kit", "chat", "--seed", str(given.seed)]
    cells, seconds = record([*command, "-n", str(given.max_new_tokens)])
    svg = animated(cells, COLUMNS, seconds + LAST_SECONDS, "medusa-kit chat")
    if len(svg.encode()) > LARGEST:
        raise SystemExit(f"the recording has {len(svg.encode())} bytes; expected {LARGEST} or less")
    with atomic_write(given.out) as temporary:
        temporary.write_text(svg, encoding="utf-8")
    print(f"{given.out}: {len(svg.encode()):,} bytes, {seconds:.1f} s")


if __name__ == "__main__":
    main()
