"""Draws the list of mutants, or runs it."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.mutants.drawing import LIST, SEED, draw, read_list, write_list
from benchmarks.mutants.running import Run
from medusa_kit import console
from medusa_kit.errors import ConfigError, MedusaKitError

ROOT = Path(__file__).parents[2]


def numbers_of(text: str) -> set[int]:
    """Of "1-20,35". Raises ConfigError."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            raise ConfigError(f"ONLY is {text!r}", hint="numbers and ranges: 1-20,35") from None
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where mutants survive."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("what", choices=["draw", "run"])
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose files are mutated")
    parser.add_argument("--only", help="numbers of mutants, such as 1-20,35")
    parser.add_argument("--output", type=Path, default=LIST.with_name("results.json"))
    asked = parser.parse_args(arguments)
    try:
        if asked.what == "draw":
            write_list(draw(asked.tree, SEED))
            return 0
        chosen = numbers_of(asked.only) if asked.only else None
        run = Run(asked.tree.resolve(), asked.output)
        run.of([one for one in read_list() if chosen is None or one.number in chosen])
    except MedusaKitError as error:
        console.err.print(f"error: {error}", markup=False, highlight=False)
        return error.exit_code
    counts = Counter(one["state"] for one in run.found.values())
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
