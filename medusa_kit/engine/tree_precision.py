"""Tells of a tree that was found with activations of another precision.

It is used all the same: answers do not depend on it, only how fast they come.
"""

import importlib.resources
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.tree.plan import read_fields

ACTIVATIONS = "activations"  # in tree.json
SHIPPED = Path(str(importlib.resources.files("medusa_kit"))).resolve() / "assets"


def note_if_precision_differs(tree: Path | None, activations: str) -> None:
    """At most one line, for a file of a tree and an engine's precision; none for a tree of the
    package, which is meant for all of them."""
    precision = _precision_of(read_fields(tree))
    if precision not in (None, activations) and not _is_shipped(tree):
        console.note(
            f"{tree} was found with {precision} activations; with {activations} another tree may "
            "be faster: `medusa-kit tree-search --config engine.yaml`, a file that you write with "
            f"the lines `model: …`, `heads: …` and `activations: {activations}`"
        )


def _is_shipped(tree: Path | None) -> bool:
    return tree is not None and SHIPPED in tree.resolve().parents


def _precision_of(fields: dict[str, Any]) -> str | None:
    """None for one that no search has found. Older searches, which do not say it, were in
    float32."""
    return str(fields.get(ACTIVATIONS, FLOAT32)) if "table" in fields else None
