"""Tells of a tree that was found with activations of another precision.

It is used all the same: answers do not depend on it, only how fast they come.
"""

from contextlib import suppress
from pathlib import Path

from medusa_kit import console
from medusa_kit.files import parse_json
from medusa_kit.settings.engine import FLOAT32

ACTIVATIONS = "activations"  # in tree.json


def tell_of_precision(tree: Path | None, activations: str) -> None:
    """At most one line, for a file of a tree and an engine's precision."""
    precision = None if tree is None else _precision_of(tree)
    if precision not in (None, activations):
        console.note(
            f"{tree} was found with {precision} activations; with {activations} another tree may "
            "be faster: `medusa-kit tree-search --config FILE`, with activations in the engine's "
            "file"
        )


def _precision_of(tree: Path) -> str | None:
    """None for one that no search has found. Older searches, which do not say it, were in
    float32."""
    with suppress(OSError, ValueError):  # reading the tree tells what is wrong with it
        raw = parse_json(tree.read_text(encoding="utf-8"))
        if isinstance(raw, dict) and "table" in raw:
            return str(raw.get(ACTIVATIONS, FLOAT32))
    return None
