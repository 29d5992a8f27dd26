"""Find the tree for this model on this machine: statistics, sorting, replay, step times, choice.

Longest is not fastest: of the best trees of each size the one with the most tokens a second wins,
and plain decoding (one node) is among them.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.errors import ConfigError
from medusa_kit.infer.engine import Engine
from medusa_kit.infer.step_time import measure_step_times
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.replay import replay
from medusa_kit.tree.search import best_trees, choose
from medusa_kit.tree.statistics import RankStatistics

DEFAULT_SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
HELD_OUT = 0.25
FEW_POSITIONS = 50_000


@dataclass(frozen=True)
class TreeRow:
    """One size in the table. `acceptance_length` is by replay on held-out answers."""

    num_nodes: int
    tree: CandidateTree
    promised_length: float
    acceptance_length: float
    step_seconds: float
    speed_up: float  # predicted, over one-node decoding in the same engine
    method: str


@dataclass(frozen=True)
class TreeSearch:
    rows: list[TreeRow]
    chosen: TreeRow
    num_positions: int

    def as_extra(self, engine: Engine) -> dict[str, Any]:
        """What tree.json says beside the choices: where they come from."""
        return {
            "acceptance_length": round(self.chosen.acceptance_length, 4),
            "predicted_speed_up": round(self.chosen.speed_up, 4),
            "calibration_positions": self.num_positions,
            "base_model": engine.base.info.name,
            "base_fingerprint": engine.base.info.fingerprint,
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "device": machine_name(engine.base.device),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
            "table": [
                {
                    "num_nodes": row.num_nodes,
                    "acceptance_length": round(row.acceptance_length, 4),
                    "step_ms": round(row.step_seconds * 1e3, 3),
                    "predicted_speed_up": round(row.speed_up, 4),
                }
                for row in self.rows
            ],
        }


def machine_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def search_tree(
    engine: Engine,
    statistics: RankStatistics,
    sizes: Sequence[int] = DEFAULT_SIZES,
    fixed_size: int | None = None,
) -> TreeSearch:
    """The fastest tree for `engine`; `fixed_size` takes that size whatever its speed.

    Raises ConfigError for statistics of other heads, TreeError for impossible sizes.
    """
    _check_statistics(engine, statistics)
    if statistics.num_positions < FEW_POSITIONS:
        console.warn(
            f"{statistics.num_positions:,} calibration positions; {FEW_POSITIONS:,} and more make "
            "the tree reliable"
        )
    wanted = sorted({1, *sizes, *([fixed_size] if fixed_size else [])})
    fit, held_out = statistics.split(HELD_OUT, seed=0)
    results = best_trees(fit, wanted, held_out)
    trees = {size: result.tree for size, result in results.items()}
    seconds = measure_step_times(engine, trees)
    rows = [
        TreeRow(
            size,
            result.tree,
            result.promised_length,
            result.replayed_length,
            seconds[size],
            result.replayed_length * seconds[1] / seconds[size],
            result.method,
        )
        for size, result in sorted(results.items())
    ]
    chosen = fixed_size or choose(results, seconds)
    return TreeSearch(
        rows, next(row for row in rows if row.num_nodes == chosen), statistics.num_positions
    )


def judge_tree(engine: Engine, statistics: RankStatistics, tree: CandidateTree) -> TreeSearch:
    """The same table for one given tree (a published `medusa_choices` list, say)."""
    _check_statistics(engine, statistics)
    assert engine.heads is not None
    tree.check_fits(engine.heads.num_heads, engine.heads.num_columns)
    length = replay(tree, statistics).acceptance_length
    trees = {1: CandidateTree.root_only(), tree.num_nodes: tree}
    seconds = measure_step_times(engine, trees)
    rows = [
        TreeRow(1, trees[1], 1.0, 1.0, seconds[1], 1.0, "plain"),
        TreeRow(
            tree.num_nodes, tree, float("nan"), length, seconds[tree.num_nodes],
            length * seconds[1] / seconds[tree.num_nodes], "given",
        ),
    ]  # fmt: skip
    return TreeSearch(rows, rows[-1], statistics.num_positions)


def _check_statistics(engine: Engine, statistics: RankStatistics) -> None:
    if engine.heads is None:
        raise ConfigError(
            f"there are no heads for {engine.base.info.name!r}, so there is no tree to find",
            hint="train some with `medusa-kit train`",
        )
    if statistics.num_heads != engine.heads.num_heads:
        raise ConfigError(
            f"the statistics are of {statistics.num_heads} heads; these are "
            f"{engine.heads.num_heads}",
            hint="calibrate again",
        )
    fingerprint = statistics.meta.get("base_fingerprint")
    if fingerprint not in (None, engine.base.info.fingerprint):
        raise ConfigError(
            f"the statistics were taken on another base ({statistics.meta.get('base_model')!r})",
            hint="calibrate again",
        )
