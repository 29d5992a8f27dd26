"""Standard output that cannot be written: a full disk, a pipe that nobody reads any more.

Whatever a command does then, it ends: with one line for a full disk, as for any error, and without
a word where the reader has left, as `| head` does. Libraries that print would make a traceback of
it, or pass over it. The program begins with this, so it imports little.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

FAILED = 1
UNREAD = 128 + 13  # SIGPIPE: the exit code, as of shells


class _Descriptor(io.FileIO):
    """The raw file below stdout. What it fails of ends the program, and is told once."""

    failed = 0  # the exit code

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failed = UNREAD if isinstance(error, BrokenPipeError) else FAILED
            _tell(error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what is buffered
            raise SystemExit(self.failed) from error  # which only a program's end catches


def _tell(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        return
    hint = "make room on the disk, or write to another one"
    lines = f"error: standard output cannot be written: {error.strerror}\nhint: {hint}\n"
    with suppress(OSError, ValueError):
        sys.stderr.write(lines)
        sys.stderr.flush()


@contextmanager
def ends_where_it_fails() -> Iterator[None]:
    """stdout is written to its end within this context, or the program ends with an exit code."""
    usual = sys.stdout
    if os.name == "nt" or not isinstance(usual, io.TextIOWrapper):  # a console has its own there
        yield
        return
    with suppress(OSError):
        usual.flush()
    descriptor = _Descriptor(usual.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(descriptor), usual.encoding, usual.errors,
        line_buffering=usual.line_buffering, write_through=usual.write_through,
    )  # fmt: skip
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = usual
        if descriptor.failed:  # where a library passed over it
            sys.exit(descriptor.failed)
