"""Runs one command: its seconds, those until it wrote, and its peak of resident memory, as JSON.

    python benchmarks/process_cost.py [--input TEXT] [--after TEXT] COMMAND...

The peak is the kernel's (ru_maxrss), mapped pages counted. A child starts with the peak of the
process that started it, so this one stays small and imports nothing large: what measures runs it
as a process of its own (`cost_of`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

KIB = 1024  # ru_maxrss counts in these, except on macOS
CHUNK = 1 << 16
SHOWN = 2000  # characters of what a failed command wrote


@dataclass(frozen=True)
class Cost:
    """What one run of a command took."""

    seconds: float
    first_output_seconds: float | None  # None: it wrote nothing (after the text asked for)
    peak_bytes: int
    output: str


def cost_of(
    command: Sequence[object],
    input: str = "",
    after: str = "",
    environment: Mapping[str, str] | None = None,
) -> Cost:
    """Measured by a small process. Raises RuntimeError for a command that fails."""
    runner = [sys.executable, "-I", "-S", __file__, "--input", input, "--after", after, "--"]
    done = subprocess.run(
        [*runner, *map(str, command)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-SHOWN:].strip()}")
    return Cost(**json.loads(done.stdout))


def measure(command: Sequence[str], given: bytes, after: bytes) -> dict[str, Any]:
    """`first_output_seconds` counts from the start to the first byte on stdout that is no white
    space and follows `after`."""
    with tempfile.TemporaryFile() as log:
        start, first, output = time.monotonic(), None, b""
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # its status says why it ended
            process.stdin.write(given)
            process.stdin.close()
        while piece := os.read(process.stdout.fileno(), CHUNK):
            output += piece
            _, found, answer = output.partition(after) if after else (b"", True, output)
            if first is None and found and answer.strip():
                first = time.monotonic() - start
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"status {process.returncode}: {(output + log.read()).decode()}")
    unit = 1 if sys.platform == "darwin" else KIB
    return {
        "seconds": seconds,
        "first_output_seconds": first,
        "peak_bytes": usage.ru_maxrss * unit,
        "output": output.decode(errors="replace"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", default="", help="what it reads on stdin")
    parser.add_argument("--after", default="", help="output counts from behind this text on")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    print(json.dumps(measure(given.command, given.input.encode(), given.after.encode())))


if __name__ == "__main__":
    main()
