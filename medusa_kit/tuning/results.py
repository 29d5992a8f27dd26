"""What calibration and tree search leave in a heads' folder: statistics, the tree, its plot."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medusa_kit import console
from medusa_kit.data.readers import AnswerRow
from medusa_kit.engine.before_loading import TREE_NAME
from medusa_kit.engine.engine import Engine
from medusa_kit.tree.plan import save_plan
from medusa_kit.tree.statistics import RankStatistics
from medusa_kit.tuning.calibrate import calibrate, fitted_dynamic_tree
from medusa_kit.tuning.charts import draw
from medusa_kit.tuning.tree_search import TreeSearch

STATISTICS_NAME, PLOT_NAME = "statistics.npz", "tree.png"


def take_statistics(
    engine: Engine,
    answers: Sequence[AnswerRow],
    folder: Path,
    source: str,
    dynamic_nodes: int | None = None,
) -> RankStatistics:
    """Measure statistics on answers, and write them. `source`: the name of the answers;
    `dynamic_nodes`: the size of dynamic trees to record, if any."""
    assert engine.heads is not None
    dynamic = None
    if dynamic_nodes is not None:
        dynamic = fitted_dynamic_tree(engine.base, engine.heads, answers, dynamic_nodes)
    statistics = calibrate(engine.base, engine.heads, answers, dynamic=dynamic)
    statistics = replace(statistics, meta={**statistics.meta, "prompts": source})
    statistics.save(folder / STATISTICS_NAME)
    return statistics


def write_search(engine: Engine, search: TreeSearch, folder: Path) -> None:
    """Write tree.json, and tree.png where matplotlib is there."""
    save_plan(search.plan, folder / TREE_NAME, search.as_extra(engine))
    console.note(f"wrote {folder / TREE_NAME}")
    alone = [row for row in search.rows if row.batch_size == 1]
    draw(folder / PLOT_NAME, lambda plots, path: plots.plot_trees(alone, search.chosen, path))
