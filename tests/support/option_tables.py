"""Tables of options in the docs, made from the dataclasses that define them.

A line `<!-- options: max_rows, max_queue -->` stands before each. `make fix` writes them anew.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_origin

from medusa_kit.settings.engine import all_options
from medusa_kit.settings.option import KINDS, Option, choices, options_of
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.settings.serve import ServeConfig

DOCS = Path(__file__).parents[2] / "docs"
SERVER = options_of(ServeConfig)
OPTIONS: Mapping[str, Option] = {**options_of(SamplingParams), **all_options(), **SERVER}
TABLE = re.compile(r"(<!-- options: (.*?) -->\n\n)((?:\|.*\n)*)")


def table(names: list[str]) -> str:
    rows = ["| option | values | default | what |", "|---|---|---|---|"]
    for name in names:
        option = OPTIONS[name]
        shown = f"--{name.replace('_', '-')}" if name in SERVER else name
        rows.append(f"| `{shown}` | {values(option)} | {default(option)} | {option.description} |")
    return "\n".join(rows) + "\n"


def values(option: Option) -> str:
    """What it takes; words are all in its description."""
    if option.allowed is not None:
        return option.allowed.expected
    kind = choices(option.kind)[0]
    return KINDS.get(get_origin(kind) or kind, "a word")


def default(option: Option) -> str:
    """Its default; one that is made elsewhere is in its description."""
    if option.required or option.default is None:
        return ""
    return f"{option.default:g}" if option.number is float else f"{option.default}"


def tables() -> Iterator[tuple[Path, list[str], str]]:
    """(page, names, the table that stands there) of each."""
    for page in sorted(DOCS.glob("*.md")):
        for _, names, found in TABLE.findall(page.read_text()):
            yield page, names.split(", "), found


def write() -> None:
    for page in {page for page, _, _ in tables()}:
        page.write_text(TABLE.sub(lambda m: m[1] + table(m[2].split(", ")), page.read_text()))


if __name__ == "__main__":
    write()
