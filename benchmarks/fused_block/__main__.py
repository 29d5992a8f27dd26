"""`python -m benchmarks.fused_block PART --output FILE`: a short measurement on a GPU (NOTES.md).

Each finding is a line of JSON, written to the file and to stdout as soon as it is there. A case
that fails is a line too, and the next one runs. Exits with 1 if one failed.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

PARTS = {"a": "bits", "b": "speed", "c": "answers"}


class Findings:
    """Lines of JSON. No case begins once the minutes are over."""

    def __init__(self, path: Path, minutes: float) -> None:
        self._path = path
        self._start, self._seconds = time.monotonic(), 60 * minutes
        self.num_failed = 0

    def write(self, case: str, **figures: Any) -> None:
        at = round(time.monotonic() - self._start, 1)
        line = json.dumps({"case": case, **figures, "at": at}, default=str)
        print(line, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def measure(self, case: str, call: Callable[[], dict[str, Any]]) -> None:
        if time.monotonic() - self._start > self._seconds:
            self.write(case, left_out="no time left")
            return
        try:
            self.write(case, **call())
        except Exception as error:
            self.num_failed += 1
            self.write(case, failed=repr(error), where=traceback.format_exc()[-1500:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="fused_block", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--output", type=Path, required=True, help="a file of lines of JSON")
    parser.add_argument("--minutes", type=float, default=4.0, help="no case begins later")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted on a CPU")
    parser.add_argument("--model", help="part c: a folder or GGUF file")
    parser.add_argument("--heads", help="part c: the heads' folder")
    options = parser.parse_args()
    if options.dry_run:  # read when triton is imported
        os.environ["TRITON_INTERPRET"] = "1"
    findings = Findings(options.output, options.minutes)
    run: Callable[..., None] = import_module(f"benchmarks.fused_block.{PARTS[options.part]}").run
    run(findings, options)
    return 1 if findings.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
