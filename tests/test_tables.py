"""No width of a terminal loses a figure."""

import io
import re

import pytest
from rich.console import Console

from medusa_kit.tables import table

COLUMNS = ("method", "tokens/s", "ratio", "decoding\nonly", "gain", "accept.\nlength", "same")
ROWS = [
    ("transformers\ngenerate", "31.4", "1.00 ×", "33.1", "–", "1.000", "2/2"),
    ("medusa-kit", "1,231.4", "16.04 ×", "1,233.1", "6.04 ×", "2.000", "10/10"),
]
PATH = "/srv/models/" + "x" * 90 + "/tree.json"


def printed(width: int, *what: object) -> str:
    written = io.StringIO()
    Console(file=written, width=width).print(table(*what))  # type: ignore[arg-type]
    return written.getvalue()


@pytest.mark.parametrize("width", [20, 30, 40, 60, 64, 79, 80, 100, 200])
def test_all_figures_are_there(width: int) -> None:
    text = printed(width, "A title", COLUMNS, ROWS)
    for cell in [*COLUMNS[1:], *(cell for row in ROWS for cell in row)]:
        assert all(part in text for part in cell.splitlines()), cell
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert ("┃" in text) == (width >= 79)


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_long_words_go_on_in_the_next_line(width: int) -> None:
    text = printed(width, "", ("check", "status", "finding"), [("heads", "ok", f"read {PATH}")])
    assert PATH in re.sub(r"[\s│]", "", text)
    assert "…" not in text
