"""Refuses a tree beside heads that was found for other ones, such as the heads that were there
before. Answers would stay exact, but the tree suits heads that are gone.

A tree that is given by name is used all the same, since somebody chose it.
"""

from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.base.origin import HEADS, check_origin, compare
from medusa_kit.errors import TreeError
from medusa_kit.tree.plan import read_fields

AGAIN = "find the tree of these heads with `medusa-kit tree-search`, or name one with --tree"


def check_tree(
    tree: Path, heads: str, base: BaseModel | None, named: bool = False, tell: bool = True
) -> None:
    """Compare the file of a tree with heads, by their digest, and base; None: whichever it is.
    `tell`: at most one line says what could not be compared. Raises TreeError."""
    said, now = read_fields(tree), dict[str, Any]({HEADS: heads})
    if base is not None:  # how it encodes text is told of elsewhere (heads_encoding.py)
        now |= base.identity
    compared = compare(said, now)
    if named:
        if tell and compared.other:
            console.note(f"{tree} was made with {compared.in_words()}")
    elif tell or compared.other:
        check_origin(tree, said, now, AGAIN, TreeError)
