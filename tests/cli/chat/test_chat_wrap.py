"""Lines that break between words, whatever the width and the pieces that the text comes in."""

import random
import textwrap

import pytest
from rich.cells import cell_len

from medusa_kit.cli.chat.wrap import WordWrap, column_after, may_break

TEXT = "Rivers carry water from the hills to the sea, and some of them are very long indeed."


def shown(text: str, width: int, pieces: list[int] | None = None) -> list[str]:
    """The lines that were broken by the wrapping itself."""
    wrap, out, start = WordWrap(width), [], 0
    for size in pieces or [len(text)]:
        out += wrap.push(text[start : start + size])
        start += size
    out += [*wrap.push(text[start:]), *wrap.finish()]
    return "".join(part for part, _ in out).split("\n")


def cells(line: str) -> int:
    first, *others = line.split("\t")
    column = cell_len(first)
    for one in others:
        column += 8 - column % 8 + cell_len(one)
    return column


@pytest.mark.parametrize("width", [12, 13, 20, 30, 80, 100])
def test_words_stay_whole_in_whatever_pieces_they_come(width: int) -> None:
    cut = random.Random(width)
    for _ in range(20):
        pieces = [cut.randint(1, 7) for _ in range(8)]
        assert shown(TEXT, width, pieces) == textwrap.wrap(TEXT, width)


def test_lines_of_the_text_stay_lines() -> None:
    code = "def f(x):\n    return x\n\n\nprint(f(1))\n"
    assert shown(code, 40) == code.split("\n")
    assert shown("a \n b", 40) == ["a", " b"]  # spaces at an end are left out
    assert shown("one\ttwo three", 13) == ["one\ttwo", "three"]
    assert shown("    " + "x" * 9, 8) == ["    " + "x" * 9]  # no line of spaces alone


def test_a_word_longer_than_a_line_begins_one() -> None:
    long = "x" * 25
    assert shown(f"see {long} there", 10) == ["see", long, "there"]  # the terminal breaks it
    assert shown(f"see {long} it", 10) == ["see", f"{long} it"]  # behind its rest there is room


def test_lines_of_text_without_spaces_are_full() -> None:
    assert shown("日本語の文章、です。", 8) == ["日本語の", "文章、で", "す。"]
    assert shown("ภาษาไทย", 4) != ["ภาษาไทย"]
    assert shown("나는 학생입니다", 10) == ["나는", "학생입니다"]
    assert shown("go \U0001f468\u200d\U0001f469", 6) == ["go", "\U0001f468\u200d\U0001f469"]


def test_no_line_begins_with_what_closes() -> None:
    assert not may_break("文", "。")
    assert not may_break("「", "文")
    assert not may_break("a", "b")
    assert may_break("文", "章")
    assert may_break("a", "文")


def test_no_line_is_longer_than_the_terminal() -> None:
    words = ["a", "water", "日本", "hills,", "\t", "e\u0301te\u0301", "\U0001f600", "été"]
    draw = random.Random(0)
    for _ in range(100):
        width = draw.randint(12, 40)
        text = " ".join(draw.choice(words) for _ in range(30))
        assert all(cells(line) <= width for line in shown(text, width))


def test_tints_stay_with_their_text() -> None:
    wrap = WordWrap(10)
    parts = [*wrap.push("own "), *wrap.push("hea", "green"), *wrap.push("ded ab"), *wrap.finish()]
    joined: dict[str | None, str] = {}
    for text, tint in parts:
        joined[tint] = joined.get(tint, "") + text
    assert joined == {None: "own ded\nab", "green": "hea"}


def test_a_terminal_that_becomes_narrower() -> None:
    wrap = WordWrap(40)
    wrap.push("one two three four five ")
    wrap.resize(10)
    assert wrap.column <= 10
    wrap.push("six ")
    assert wrap.column <= 10


@pytest.mark.parametrize(("width", "column"), [(10, 10), (7, 6), (20, 20), (64, 20)])
def test_a_resized_terminal_breaks_the_line_anew(width: int, column: int) -> None:
    """What it broke itself on the way is one line again once there is room."""
    wrap = WordWrap(40)
    wrap.push("one two three four  \nfour five six sevens ")
    assert wrap.column == 20
    for step in (5, width):
        wrap.resize(step)
    assert wrap.column == column


@pytest.mark.parametrize(("word", "most"), [("काकाका", 6), ("\u2764\ufe0f" * 3, 6)])
def test_marks_take_a_column_on_some_terminals(word: str, most: int) -> None:
    """No terminal breaks the word, whichever it is."""
    assert shown(f"some {word}", 5 + most) == [f"some {word}"]
    assert shown(f"some {word}", 4 + most) == ["some", word]


def test_columns_are_counted_as_terminals_do() -> None:
    assert column_after(0, "abc", 10) == 3
    assert column_after(8, "abc", 10) == 1
    assert column_after(0, "x" * 10, 10) == 10
    assert column_after(9, "日本", 10) == 4
    assert column_after(3, "ab\ncd", 10) == 2
    assert column_after(3, "\t!", 80) == 9
