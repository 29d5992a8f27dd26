"""Messages, reports and cards keep to the words of docs/words.md, as help texts do."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import medusa_kit

PACKAGE = Path(medusa_kit.__file__).parent
OLD = re.compile(
    r"\b(beside|unless given|kept out|in vain|go(es)? on|going on|keys and values"
    r"|guess(es)?|trained positions|dear|pays)\b",
    re.IGNORECASE,
)
NAMES = re.compile(r"`[^`]*`|--[a-z-]+|\b\w+=")  # of code and options, which keep theirs


def old_words(text: str) -> list[str]:
    return [found[0] for found in OLD.finditer(NAMES.sub("", text))]


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings of several words in it. Docstrings are for readers of code."""
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in alone else None
        if isinstance(text, str) and " " in text.strip():
            yield node.lineno, text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a part is not beside it", ["beside"]),
        ("Guesses of heads; the log goes on", ["Guesses", "goes on"]),
        ("besides the hidden state", []),
        ("--guesses all and guesses=5 of `guess`", []),
    ],
)
def test_old_words_are_found(text: str, found: list[str]) -> None:
    assert old_words(text) == found
    assert list(texts(f'"""A guess."""\nfail(f"{{x}} {text}", hint="two words")')) == [
        (2, f" {text}"), (2, "two words"),
    ]  # fmt: skip


def test_messages_use_the_words_of_the_glossary() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    read = [(path, *found) for path in files for found in texts(path.read_text(encoding="utf-8"))]
    assert len(read) > 1000
    assert [
        f"{path.relative_to(PACKAGE)}:{line}: {words} in {text!r}"
        for path, line, text in read
        if (words := old_words(text))
    ] == []
