"""The table of docs/models.md of the families that were verified: `make verified` writes it.

It runs the tests of each row. A row whose tests pass gets this version of transformers and today's
date; one whose tests fail keeps what it had. Families come from the dictionaries of the suite.
"""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import transformers
from support.models.hybrids import HYBRIDS, REFUSED
from support.tiny_models import FAMILIES, MORE

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "models.md"
HEAD = (
    "| families (`model_type`) | greedy answers equal over | test | transformers | last verified |"
)
NEVER = ("never", "never")
Stamps = dict[str, tuple[str, str]]  # by test: version of transformers, date


@dataclass(frozen=True)
class Part:
    """Families that one test verifies in one way."""

    families: Mapping[str, tuple[str, dict[str, Any]]]
    what: str
    test: str
    # What a name alone does not say, by family: which models of it the suite has.
    notes: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> str:
        said: dict[str, str] = {}
        for family, (model_type, _) in self.families.items():
            note = f" ({self.notes[family]})" if family in self.notes else ""
            said[model_type] = said.get(model_type) or note
        return " ".join(f"`{name}`{note}" for name, note in sorted(said.items()))


PARTS = (
    Part(
        FAMILIES,
        "trees of heads in several shapes; random trees in a batch",
        "tests/exactness/test_greedy.py",
    ),
    Part(
        MORE,
        "random trees in a batch",
        "tests/exactness/test_family_answers.py",
        {
            "falcon": "without ALiBi",
            "granitemoehybrid": "attention alone",
            "phi3-longrope": "longrope",
        },
    ),
    Part(
        {family: HYBRIDS[family] for family in HYBRIDS if family not in REFUSED},
        "random chains in a batch; texts that go on",
        "tests/exactness/test_hybrid_answers.py",
        {"granitemoehybrid": "with Mamba"},
    ),
)


def table(stamps: Stamps) -> str:
    lines = [HEAD, "|---|---|---|---|---|"]
    for part in PARTS:
        version, day = stamps.get(part.test, NEVER)
        lines.append(f"| {part.names()} | {part.what} | `{part.test}` | {version} | {day} |")
    return "\n".join(lines) + "\n"


def found_table(page: str) -> str:
    """The table as it stands in the page."""
    start = page.index(HEAD)
    return page[start : page.index("\n\n", start) + 1]


def found_stamps(page: str) -> Stamps:
    rows = re.findall(r"\| `(tests/\S+)` \| (\S+) \| (\S+) \|\n", found_table(page))
    return {test: (version, day) for test, version, day in rows}


def passes(test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", test]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def main(path: Path = PAGE) -> int:
    page = path.read_text()
    passed = [part.test for part in PARTS if passes(part.test)]
    now = (transformers.__version__, date.today().isoformat())
    stamps = found_stamps(page) | dict.fromkeys(passed, now)
    path.write_text(page.replace(found_table(page), table(stamps)))
    return 0 if len(passed) == len(PARTS) else 1


if __name__ == "__main__":
    sys.exit(main())
