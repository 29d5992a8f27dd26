"""What other commands leave beside heads: it goes with the heads that it was made from.

The model's answers stay (calibration_answers.jsonl), since they are the base's.
"""

from pathlib import Path

from medusa_kit import console
from medusa_kit.base.origin import HEADS
from medusa_kit.errors import CheckpointError
from medusa_kit.heads.checkpoint import stored_digest
from medusa_kit.outputs import Ours, has_keys, is_picture
from medusa_kit.tree.plan import read_fields
from medusa_kit.tree.statistics import RankStatistics

TREE_NAME, STATISTICS_NAME, PLOT_NAME = "tree.json", "statistics.npz", "tree.png"
BENCH_NAME, BENCH_PLOT_NAME, VERIFY_NAME = "bench.json", "bench.png", "verify.json"


def is_found(tree: Path) -> bool:
    """Whether a search wrote the tree; else a person did."""
    return bool({HEADS, "table"} & read_fields(tree).keys())


def is_statistics(path: Path) -> bool:
    """Damaged ones lie beside the tree that was found from them."""
    try:
        RankStatistics.load(path)
    except CheckpointError:
        return path.is_file() and is_found(path.with_name(TREE_NAME))
    return True


is_bench = has_keys("methods")
# Tells those that a command wrote from a person's own.
DERIVED: dict[str, Ours] = {
    TREE_NAME: is_found, STATISTICS_NAME: is_statistics,
    PLOT_NAME: is_picture(TREE_NAME, is_found), BENCH_NAME: is_bench,
    BENCH_PLOT_NAME: is_picture(BENCH_NAME, is_bench), VERIFY_NAME: has_keys("greedy"),
}  # fmt: skip


def drop_derived(folder: Path, heads: str) -> None:
    """Remove what was made from the heads in `folder`, before those of digest `heads` take their
    place. What a person put there, such as a tree, stays."""
    if stored_digest(folder) == heads:
        return
    gone = [name for name, ours in DERIVED.items() if ours(folder / name)]
    for name in gone:
        (folder / name).unlink()
    if gone:
        console.note(
            f"{folder}: other heads come, so {', '.join(gone)} of those before are removed"
        )
