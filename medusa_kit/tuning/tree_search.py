"""Finds the fastest tree for a model on a machine, from rank statistics and step times.

The longest tree is not the fastest: of the best trees of each size, static and dynamic, the one
with the most tokens a second wins. Plain decoding (one node) is among them.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.base.fingerprint import OLD_NOTE, Match, compare
from medusa_kit.base.origin import BASE, HEADS, STATISTICS, check_origin
from medusa_kit.base.tokenizer.encoding_digest import DIFFERS, ENCODING, Encodings
from medusa_kit.base.tokenizer.encoding_digest import compare as compare_encodings
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.tree_precision import ACTIVATIONS
from medusa_kit.errors import ConfigError
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree
from medusa_kit.tree.plan import PlannedTree, Tree, TreePlan
from medusa_kit.tree.replay import node_shares, replay, replay_dynamic
from medusa_kit.tree.search import SearchResult, best_trees
from medusa_kit.tree.statistics import RankStatistics
from medusa_kit.tuning.chains import chain_of, chain_step_times, chains
from medusa_kit.tuning.step_time import measure_step_times

DEFAULT_SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
HELD_OUT = 0.25
FEW_POSITIONS = 50_000
# Of another speed-up: step times jitter by as much, and what decoding gains by choosing nodes of a
# dynamic tree anew at each step, some 5 %, is in no prediction.
ALIKE = 0.95


@dataclass(frozen=True)
class TreeRow:
    """One line of the table. `acceptance_length` is by replay on held-out answers.

    `dynamic`: how trees of this size are grown; `tree` is then the static one of the same size.
    """

    num_nodes: int
    tree: CandidateTree
    promised_length: float
    acceptance_length: float
    step_seconds: float
    speed_up: float  # predicted, over one-node decoding in the same engine
    method: str
    dynamic: DynamicTree | None = None
    batch_size: int = 1
    # Of each node below the root, where the tree was chosen.
    acceptance: tuple[float, ...] | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        return {
            **({"batch_size": self.batch_size} if self.batch_size > 1 else {}),
            "num_nodes": self.num_nodes,
            **({"dynamic": True} if self.dynamic else {}),
            "acceptance_length": round(self.acceptance_length, 4),
            "step_ms": round(self.step_seconds * 1e3, 3),
            "predicted_speed_up": round(self.speed_up, 4),
        }


@dataclass(frozen=True)
class TreeSearch:
    """`chosen`: the fastest for batch size 1; `by_batch`: the fastest for each batch size.

    `decoded`: what decoding is expected to make of `chosen` on this machine. That is a smaller tree
    where nodes are verified as they pay and `chosen` is larger than that.
    """

    rows: list[TreeRow]
    by_batch: list[TreeRow]
    num_positions: int
    decoded: TreeRow
    origin: Mapping[str, Any] = field(default_factory=dict)  # of the statistics

    @property
    def chosen(self) -> TreeRow:
        return self.by_batch[0]

    @property
    def plan(self) -> TreePlan:
        return TreePlan(
            tuple(
                PlannedTree(row.batch_size, row.tree, row.dynamic, row.acceptance)
                for row in self.by_batch
            )
        )

    def as_extra(self, engine: Engine) -> dict[str, Any]:
        """The fields of tree.json that say where its trees come from."""
        return {
            "acceptance_length": round(self.chosen.acceptance_length, 4),
            "predicted_speed_up": round(self.decoded.speed_up, 4),
            "calibration_positions": self.num_positions,
            "base_model": engine.base.info.name,
            **engine.base.origin,
            **self.origin,
            "base_weights": engine.weights,
            ACTIVATIONS: engine.activations,
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "device": machine_name(engine.base.device),
                "steps_run_by": engine.steps_run_by,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
            "table": [row.as_dict() for row in self.rows],
        }


def machine_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def search_tree(
    engine: Engine,
    statistics: RankStatistics,
    sizes: Sequence[int] = DEFAULT_SIZES,
    fixed_size: int | None = None,
    batch_sizes: Sequence[int] = (1,),
) -> TreeSearch:
    """The fastest tree for `engine`, at batch size 1 and at each of `batch_sizes`.

    Dynamic trees of the same sizes compete where the statistics recorded them. With `fixed_size`
    that size is chosen whatever its speed. Raises ConfigError for statistics of other heads or
    batch sizes below 1, TreeError for impossible sizes.
    """
    _check_statistics(engine, statistics)
    if min(batch_sizes, default=1) < 1:
        raise ConfigError(f"batch size {min(batch_sizes)} is out of range; expected 1 or more")
    if statistics.num_positions < FEW_POSITIONS:
        console.warn(
            f"only {statistics.num_positions:,} calibration tokens: the tree can be used, but "
            f"another may be faster; more prompts help, up to {FEW_POSITIONS:,} tokens of answers"
        )
    all_sizes = sorted({1, *sizes, *([fixed_size] if fixed_size else [])})
    fit, held_out = statistics.split(HELD_OUT, seed=0)
    if engine.verifier.chains_only:
        CandidateTree.chain((fixed_size or 1) - 1).check_fits(statistics.num_heads, 1)
        results = chains(all_sizes, held_out)
    else:
        results = best_trees(fit, all_sizes, held_out)
    contenders = [_static_row(result) for result in results.values()]
    contenders += _dynamic_rows(engine, results, held_out)
    rows, by_batch = [], []
    for batch_size in sorted({1, *batch_sizes}):
        timed = _timed(engine, contenders, batch_size, held_out)
        rows += timed
        fastest = _fastest(timed)
        size = fixed_size or fastest.num_nodes
        fixed = [row for row in timed if row.num_nodes == size] or [fastest]
        by_batch.append(_with_acceptance(_best_of_one_size(engine, fixed, timed), held_out))
    decoded = _decoded(engine, by_batch[0], rows)
    return TreeSearch(rows, by_batch, statistics.num_positions, decoded, _origin_of(statistics))


def _origin_of(statistics: RankStatistics) -> dict[str, Any]:
    """What trees say that they were found from. Of older statistics it is not known whose they
    are, and so of their trees."""
    said = {name: statistics.meta.get(name) for name in (ENCODING, HEADS)}
    return {**said, STATISTICS: statistics.digest}


def _best_of_one_size(engine: Engine, rows: Sequence[TreeRow], timed: Sequence[TreeRow]) -> TreeRow:
    """The row that decoding is expected to be fastest with. Of those that are alike it is a dynamic
    one where nodes are verified as they gain, since its chances are those of the step."""
    speeds = [_decoded(engine, row, timed).speed_up for row in rows]
    min_speed = ALIKE * max(speeds)
    alike = [row for row, speed in zip(rows, speeds, strict=True) if speed >= min_speed]
    if not engine.pays:
        return _fastest(alike)
    return _fastest([row for row in alike if row.dynamic] or alike)


def _fastest(rows: Sequence[TreeRow]) -> TreeRow:
    """The fastest row; ties go to fewer nodes, then to static trees."""
    return max(sorted(rows, key=lambda row: row.num_nodes), key=lambda row: row.speed_up)


def _decoded(engine: Engine, row: TreeRow, timed: Sequence[TreeRow]) -> TreeRow:
    """The row that decoding comes to: the row itself, or where nodes are verified as they gain the
    fastest of its sort that is no larger, plain decoding among them."""
    if not engine.pays:
        return row

    def can_come_of_it(candidate: TreeRow) -> bool:
        same_sort = (candidate.dynamic is None) == (row.dynamic is None)
        smaller = candidate.batch_size == row.batch_size and candidate.num_nodes <= row.num_nodes
        return smaller and (same_sort or candidate.num_nodes == 1)

    return _fastest([candidate for candidate in timed if can_come_of_it(candidate)])


def _with_acceptance(row: TreeRow, statistics: RankStatistics) -> TreeRow:
    shares = node_shares(row.dynamic or row.tree, statistics)[1:]
    return replace(row, acceptance=tuple(round(share, 4) for share in shares))


def _static_row(result: SearchResult) -> TreeRow:
    length = result.replayed_length if result.tree.num_nodes > 1 else 1.0
    promised = result.promised_length
    return TreeRow(result.tree.num_nodes, result.tree, promised, length, 0.0, 0.0, result.method)


def _dynamic_rows(
    engine: Engine, results: Mapping[int, SearchResult], held_out: RankStatistics
) -> list[TreeRow]:
    """The dynamic tree of each size; none where the statistics recorded none, or chains alone can
    be verified."""
    if held_out.entries_PK is None or engine.verifier.chains_only:
        return []
    assert engine.heads is not None
    recorded = DynamicTree.from_dict(held_out.meta.get("dynamic"))
    recorded.check_fits(engine.heads.num_heads, engine.heads.num_columns)
    return [
        TreeRow(
            size,
            result.tree,
            float("nan"),
            replay_dynamic(size, held_out).acceptance_length,
            0.0,
            0.0,
            "dynamic",
            replace(recorded, num_nodes=size),
        )
        for size, result in results.items()
        if 2 <= size <= recorded.num_nodes
    ]


def _timed(
    engine: Engine, rows: Sequence[TreeRow], batch_size: int, statistics: RankStatistics
) -> list[TreeRow]:
    """The rows with their step times at this batch size, static before dynamic ones."""
    trees: dict[Any, Tree] = {
        row.num_nodes if row.dynamic is None else ("dynamic", row.num_nodes): row.dynamic
        or row.tree
        for row in rows
    }
    if engine.verifier.chains_only:
        seconds = chain_step_times(engine, trees, statistics, batch_size)
    else:
        seconds = measure_step_times(engine, trees, batch_size=batch_size)
    return [
        replace(
            row,
            step_seconds=seconds[key],
            speed_up=row.acceptance_length * seconds[1] / seconds[key],
            batch_size=batch_size,
        )
        for key, row in zip(trees, rows, strict=True)
    ]


def judge_tree(engine: Engine, statistics: RankStatistics, tree: CandidateTree) -> TreeSearch:
    """The table of `search_tree` for one given tree (a published `medusa_choices` list, say), or
    for what can be verified of it."""
    _check_statistics(engine, statistics)
    assert engine.heads is not None
    tree = chain_of(tree) if engine.verifier.chains_only else tree
    tree.check_fits(engine.heads.num_heads, engine.heads.num_columns)
    length = replay(tree, statistics).acceptance_length
    plain = TreeRow(1, CandidateTree.root_only(), 1.0, 1.0, 0.0, 0.0, "plain")
    given = TreeRow(tree.num_nodes, tree, float("nan"), length, 0.0, 0.0, "given")
    rows = _timed(engine, [plain, given] if tree.num_nodes > 1 else [plain], 1, statistics)
    chosen = _with_acceptance(rows[-1], statistics)
    decoded, origin = _decoded(engine, chosen, rows), _origin_of(statistics)
    return TreeSearch(rows, [chosen], statistics.num_positions, decoded, origin)


def _check_statistics(engine: Engine, statistics: RankStatistics) -> None:
    if engine.heads is None:
        raise ConfigError(
            f"there are no heads for {engine.base.info.name!r}, so no tree can be searched",
            hint="train some with `medusa-kit train`",
        )
    if statistics.num_heads != engine.heads.num_heads:
        raise ConfigError(
            f"the statistics are of {statistics.num_heads} heads; these are "
            f"{engine.heads.num_heads}",
            hint="calibrate again",
        )
    base = engine.base.info.fingerprint
    match = compare(statistics.meta.get(BASE) or base, base)
    if match is Match.OLD:
        console.note(f"the statistics: {OLD_NOTE}")
    if match is Match.OTHER:
        raise ConfigError(
            f"the statistics were taken on another base ({statistics.meta.get('base_model')!r})",
            hint="calibrate again",
        )
    now = {**engine.base.identity, HEADS: engine.heads.digest}
    check_origin(
        statistics.path or "the file of statistics", statistics.meta, now,
        hint="calibrate again, with --prompts or --answers",
    )  # fmt: skip
    encoding = engine.base.encoding
    encodings = compare_encodings(statistics.meta.get(ENCODING), encoding)
    if encoding is not None and encodings in DIFFERS:
        what = "were taken on" if encodings is Encodings.OTHER else "do not say whether they are of"
        console.note(
            f"the statistics {what} text that was tokenized differently than "
            f"{engine.base.info.name} tokenizes it now; `medusa-kit tree-search --prompts "
            "FILE` takes new ones"
        )
