"""What other commands leave beside heads: it goes with the heads that it was made from.

The model's answers stay (calibration_answers.jsonl), since they are the base's.
"""

from pathlib import Path

from medusa_kit import console
from medusa_kit.base.origin import HEADS
from medusa_kit.heads.checkpoint import stored_digest
from medusa_kit.tree.plan import read_fields

TREE_NAME = "tree.json"
DERIVED = (TREE_NAME, "tree.png", "statistics.npz", "bench.json", "bench.png", "verify.json")


def is_found(tree: Path) -> bool:
    """Whether a search wrote the tree; else a person did."""
    return bool({HEADS, "table"} & read_fields(tree).keys())


def drop_derived(folder: Path, heads: str) -> None:
    """Remove what was made from the heads in `folder`, before those of digest `heads` take their
    place. A tree that a person wrote stays."""
    if stored_digest(folder) == heads:
        return
    gone = [name for name in DERIVED if (folder / name).is_file()]
    if TREE_NAME in gone and not is_found(folder / TREE_NAME):
        gone.remove(TREE_NAME)
    for name in gone:
        (folder / name).unlink()
    if gone:
        console.note(
            f"{folder}: other heads come, so {', '.join(gone)} of those before are removed"
        )
