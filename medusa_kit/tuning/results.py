"""What calibration and tree search leave in a heads' folder: statistics, the tree, its plot."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medusa_kit import console
from medusa_kit.data.answer_settings import settings_path
from medusa_kit.data.readers import AnswerRow
from medusa_kit.engine.engine import Engine
from medusa_kit.heads.derived import DERIVED, PLOT_NAME, STATISTICS_NAME, TREE_NAME
from medusa_kit.outputs import check_folder, check_replaced
from medusa_kit.together import finish_moves, moved_together
from medusa_kit.tree.plan import save_plan
from medusa_kit.tree.statistics import RankStatistics
from medusa_kit.tuning.calibrate import calibrate, fitted_dynamic_tree
from medusa_kit.tuning.charts import draw
from medusa_kit.tuning.tree_search import TreeSearch

ANSWERS_NAME = "calibration_answers.jsonl"  # of prompts


def check_results(folder: Path) -> None:
    """Raises ConfigError, before anything is loaded, where results would replace what is no result
    of a search."""
    check_folder(folder, "--output")
    finish_moves(folder)
    found = {name: DERIVED[name] for name in (TREE_NAME, STATISTICS_NAME, PLOT_NAME)}
    answers = {ANSWERS_NAME: lambda path: settings_path(path).is_file()}
    check_replaced(folder, {**found, **answers}, "--output")


def take_statistics(
    engine: Engine,
    answers: Sequence[AnswerRow],
    folder: Path | None,
    source: str,
    dynamic_nodes: int | None = None,
) -> RankStatistics:
    """Measure statistics on answers, and write them where a folder is given. `source`: the name of
    the answers; `dynamic_nodes`: the size of dynamic trees to record, if any."""
    assert engine.heads is not None
    dynamic = None
    if dynamic_nodes is not None:
        dynamic = fitted_dynamic_tree(engine.base, engine.heads, answers, dynamic_nodes)
    statistics = calibrate(engine.base, engine.heads, answers, dynamic=dynamic)
    statistics = replace(statistics, meta={**statistics.meta, "prompts": source})
    if folder is not None:
        statistics.save(folder / STATISTICS_NAME)
    return statistics


def write_search(
    engine: Engine,
    search: TreeSearch,
    folder: Path,
    statistics: RankStatistics | None = None,
    answers: Path | None = None,
) -> None:
    """Write tree.json, tree.png where matplotlib is there, and with them what the tree was found
    from: `statistics`, and a file of answers, which is copied. All come to be there, or none."""
    alone = [row for row in search.rows if row.batch_size == 1]
    with moved_together(folder, replaced=[PLOT_NAME]) as new:
        if answers is not None:
            shutil.copyfile(answers, new / ANSWERS_NAME)
            shutil.copyfile(settings_path(answers), settings_path(new / ANSWERS_NAME))
        if statistics is not None:
            statistics.save(new / STATISTICS_NAME)
        save_plan(search.plan, new / TREE_NAME, search.as_extra(engine))
        draw(
            new / PLOT_NAME,
            lambda plots, path: plots.plot_trees(alone, search.chosen, path),
            folder / PLOT_NAME,
        )
    console.note(f"wrote {folder / TREE_NAME}")
