"""Measurements, read from the files beside heads. The card reports these and nothing else.

tree.json        the trees compared on a machine
statistics.npz   ranks of the true tokens on calibration answers: replayed here, on the answers that
                 the search held out
bench.json       `medusa-kit bench`, one file for each prompt set
verify.json      `medusa-kit verify`
provenance.json  the recipe, and the versions it ran with

Files about another base or other heads are refused. So is what was measured with rounded weights.
Shapes: P positions, K heads, N nodes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from medusa_kit.base.fingerprint import SAME_MODEL, compare
from medusa_kit.base.model import CHECKPOINT
from medusa_kit.base.origin import (
    BASE,
    CONFIG,
    HEADS,
    STATISTICS,
    TREE,
    Comparison,
    check_origin,
    tell_unknown,
)
from medusa_kit.base.origin import compare as compare_origins
from medusa_kit.base.tokenizer.encoding_digest import ENCODING
from medusa_kit.bench.about import About
from medusa_kit.bench.report import BenchReport
from medusa_kit.bench.verify_report import VerifyReport
from medusa_kit.errors import ConfigError, DataError, first_found
from medusa_kit.files import file_digest, parse_json
from medusa_kit.heads.checkpoint import (
    CONFIG_NAME,
    PAIRED_FOLDER,
    WEIGHTS_NAME,
    read_config,
    read_tensors,
)
from medusa_kit.heads.config import HeadsConfig
from medusa_kit.heads.derived import TREE_NAME
from medusa_kit.heads.digest import heads_digest
from medusa_kit.heads.weights_base import check_weights_base
from medusa_kit.hub.redact_paths import is_local
from medusa_kit.paths import expanded
from medusa_kit.store.beside import found_beside
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.plan import TreePlan, load_plan, read_fields
from medusa_kit.tree.replay import ReplayResult, node_shares, replay, replay_dynamic
from medusa_kit.tree.statistics import RankStatistics
from medusa_kit.tuning.tree_search import HELD_OUT

STATISTICS_NAME, PROVENANCE_NAME = "statistics.npz", "provenance.json"
RUN_NAME = "run.json"
LOCAL_SOURCES = {"folder", "gguf", "adapter", "memory"}
BENCH_NAME, VERIFY_NAME = "bench.json", "verify.json"
CALIBRATE = "calibrate again: `medusa-kit tree-search` with prompts or answers"
TOP = (1, 5)  # draft tokens of a head that count as a hit
Report = TypeVar("Report")


@dataclass(frozen=True)
class Replayed:
    """The tree on answers its search did not see, and each head's own hits on all of them."""

    result: ReplayResult
    prompts: str | None  # the calibration set's name
    num_answers: int  # held out
    num_positions: int  # of all answers
    hits_K: list[list[float]]  # share with the true token among the first 1 and 5 draft tokens
    values_N: list[float] | None  # share of steps that accept a node; None for trees grown anew


@dataclass(frozen=True)
class Here:
    """What lies in the folder, which figures must be about. `heads`: their digest; `weights`: that
    of their file, which reports of earlier versions have."""

    config: HeadsConfig
    heads: str
    weights: str
    plan: TreePlan | None

    @property
    def trees(self) -> list[str]:
        """Digests of the tree in use: as it is, or for a base that verifies chains alone."""
        plan = self.plan or TreePlan.of(CandidateTree.chain(self.config.num_heads))
        return [plan.digest, plan.as_chains().digest]


@dataclass(frozen=True)
class Measured:
    """Everything the card may report. None: not measured."""

    folder: Path
    config: HeadsConfig
    weights_digest: str  # of their file
    heads_digest: str  # which reports name
    tree: dict[str, Any] | None
    plan: TreePlan | None
    replayed: Replayed | None
    benches: list[BenchReport]
    verify: dict[str, VerifyReport]
    provenance: dict[str, Any] | None
    run: dict[str, Any] | None = None  # run.json of the training

    @property
    def recipe(self) -> dict[str, Any] | None:
        return (self.provenance or {}).get("recipe")

    @property
    def base_is_local(self) -> bool:
        """Whether the base was a folder or file of some machine, as far as anything beside the
        heads tells; names of both kinds may look alike. It does not matter where this runs."""
        name = self.config.base_model_name
        if is_local(name) or name.count("/") != 1 or name.endswith(".gguf"):
            return True
        reports: list[BenchReport | VerifyReport] = [*self.benches, *self.verify.values()]
        bases = [*(report.about.base for report in reports), (self.run or {}).get("base") or {}]
        sources = {base.get("source") for base in bases}
        recipes = [self.recipe or {}, (self.run or {}).get("recipe") or {}]
        if any(recipe.get("stage") == "medusa2" for recipe in recipes):
            return True  # what that run made of its base, in a folder of its own
        recipe_models = {str((recipe.get("base") or {}).get("model", "")) for recipe in recipes}
        folders = (Path(), *self.folder.resolve().parents)
        return (
            bool(sources & LOCAL_SOURCES)
            or any(is_local(model) for model in recipe_models)
            or any((parent / name).exists() for parent in folders)
        )


def read_measured(
    folder: Path, benches: Sequence[Path] = (), verify: Path | None = None
) -> Measured:
    """Read everything that was measured of the heads in `folder`.

    `benches` and `verify`: files to read besides, or instead of, those in the folder.

    Raises CheckpointError (no heads in `folder`), TreeError, DataError (a file that is not what its
    name says), ConfigError (one about another base, other heads or rounded weights).
    """
    folder = expanded(folder)
    config = _config(folder)
    digest = file_digest(folder / WEIGHTS_NAME)
    heads = heads_digest(config, read_tensors(folder / WEIGHTS_NAME))
    check_weights_base(folder / WEIGHTS_NAME, config)
    tree, plan = _tree(folder, config, heads)
    here = Here(config, heads, digest, plan)
    own = [folder / BENCH_NAME] if (folder / BENCH_NAME).is_file() else []
    named = dict.fromkeys(expanded(path).resolve() for path in [*own, *benches])  # each once
    verify = verify or (folder / VERIFY_NAME if (folder / VERIFY_NAME).is_file() else None)
    return Measured(
        folder,
        config,
        digest,
        heads,
        tree,
        plan,
        _replayed(folder, here, tree),
        [_bench(path, here) for path in named],
        {} if verify is None else _verify(expanded(verify), here),
        _provenance(folder, here),
        _run(folder),
    )


def _run(folder: Path) -> dict[str, Any] | None:
    """run.json of the run that the heads lie in: `heads` in it, or inside its model or adapter."""
    parents = list(folder.resolve().parents)[:2]
    path = next((parent / RUN_NAME for parent in parents if (parent / RUN_NAME).is_file()), None)
    return None if path is None else _json(path)


def _config(folder: Path) -> HeadsConfig:
    whole = (folder / CONFIG_NAME).is_file()
    for nested in (folder / PAIRED_FOLDER, *(() if whole else (folder / "heads",))):
        if (nested / CONFIG_NAME).is_file():
            raise ConfigError(
                f"{folder} is no heads folder: its heads lie in {nested}", hint=f"push {nested}"
            )
    config = read_config(folder)
    if not (folder / WEIGHTS_NAME).is_file():
        raise ConfigError(
            f"{folder} is incomplete: {WEIGHTS_NAME} is missing", hint="copy it again"
        )
    return config


def _json(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path} is no report: it holds a {type(record).__name__}")
    return record


def _check_base(path: Path, fingerprint: Any, config: HeadsConfig) -> None:
    own = config.base_fingerprint
    if fingerprint is not None and compare(fingerprint, own) not in SAME_MODEL:
        raise ConfigError(
            f"{path} was measured on another base: fingerprint {fingerprint!r}, the heads' is "
            f"{own!r}",
            hint="measure again with these heads, or leave the file out",
        )


def _check_weights(path: Path, weights: Any, lossy: bool = False) -> None:
    """A card is about the base itself, and reports identical answers."""
    if lossy or weights not in (None, CHECKPOINT):
        raise ConfigError(
            f"{path} was measured with {weights or 'changed'} weights, which is lossy: its figures "
            "are those of another model than the base",
            hint=f"measure again with --weights {CHECKPOINT}, or leave the file out",
        )


def _tell_of_unknown(path: Path, about: About, here: Here) -> None:
    """At most one line, for a report of an earlier version."""
    unknown = [HEADS] if not about.digests else [] if about.trees else [TREE]
    tell_unknown(path, [*unknown, *_compared(about, here).unknown])


def _compared(about: About, here: Here) -> Comparison:
    """How the base of a report relates to the heads', besides its weights."""
    then = {BASE: about.base.get("fingerprint"), CONFIG: about.base_config,
            ENCODING: about.encoding}  # fmt: skip
    compared = compare_origins(then, here.config.origin)
    compared.other.pop(BASE, None)
    return Comparison(compared.other, [name for name in compared.unknown if name != BASE])


def _check_about(path: Path, about: About, here: Here, lossy: bool = False) -> None:
    """Raises ConfigError for a report that is not about this base, these heads and their tree."""
    _check_base(path, about.base.get("fingerprint"), here.config)
    _check_weights(path, about.base.get("weights"), lossy or about.lossy)
    if (compared := _compared(about, here)).other:
        raise ConfigError(
            f"{path} was measured with {compared.in_words()}",
            hint="measure again with these heads, or leave the file out",
        )
    if about.digests and not {here.heads, here.weights} & set(about.digests.values()):
        raise ConfigError(
            f"{path} was measured with other heads: none has the weights of this folder",
            hint="measure again with these heads, or leave the file out",
        )
    trees = [about.trees[name] for name, heads in about.digests.items()
             if heads == here.heads and name in about.trees]  # fmt: skip
    if trees and not {*here.trees} & {*trees}:
        raise ConfigError(
            f"{path} was measured with another tree than the one in this folder",
            hint="measure again with this tree, or leave the file out",
        )


def _made_from(config: HeadsConfig, heads: str) -> dict[str, Any]:
    """What trees and statistics of these heads say."""
    return {HEADS: heads, BASE: config.base_fingerprint, CONFIG: config.base_config}


def _tree(
    folder: Path, config: HeadsConfig, heads: str
) -> tuple[dict[str, Any] | None, TreePlan | None]:
    path = found_beside(folder, TREE_NAME)
    if not path.is_file():
        return None, None
    tree, plan = read_fields(path), load_plan(path)
    again = "find the tree of these heads: `medusa-kit tree-search`"
    check_origin(path, tree, _made_from(config, heads), again)
    plan.check_fits(config.num_heads, config.reduced_size or config.vocab_size)
    _check_weights(path, tree.get("base_weights"))
    return tree, plan


def _replayed(folder: Path, here: Here, tree: dict[str, Any] | None) -> Replayed | None:
    """Raises ConfigError for statistics of other heads, or that the tree was not found from: the
    answers that its search held out are not known then."""
    path, config, plan = found_beside(folder, STATISTICS_NAME), here.config, here.plan
    if not path.is_file() or plan is None:
        return None
    statistics = RankStatistics.load(path)
    if statistics.num_heads != config.num_heads:
        raise ConfigError(
            f"{path} is about {statistics.num_heads} heads; here are {config.num_heads}",
            hint=CALIBRATE,
        )
    check_origin(path, statistics.meta, _made_from(config, here.heads), CALIBRATE)
    if compare_origins(tree or {}, {STATISTICS: statistics.digest}).other:
        raise ConfigError(
            f"{folder / TREE_NAME} was found from other statistics than {path}", hint=CALIBRATE
        )
    held_out = statistics
    if statistics.num_answers > 1:
        _, held_out = statistics.split(HELD_OUT, seed=0)  # the search's own
    in_use, values_N = plan.for_batch(1), None
    if isinstance(in_use, CandidateTree):
        result = replay(in_use, held_out)
        values_N = node_shares(in_use, held_out)
    else:
        result = replay_dynamic(in_use.num_nodes, held_out)
    hits_KR = statistics.marginals().cumsum(axis=1)
    hits_K = [[float(row[min(top, len(row)) - 1]) for top in TOP] for row in hits_KR]
    positions = statistics.num_positions
    prompts = statistics.meta.get("prompts")
    return Replayed(result, prompts, held_out.num_answers, positions, hits_K, values_N)


def _provenance(folder: Path, here: Here) -> dict[str, Any] | None:
    path = folder / PROVENANCE_NAME
    if not path.is_file():
        return None
    record = _json(path)
    check_origin(path, record, {HEADS: here.heads}, "copy the whole folder again, or remove it")
    return record


def _bench(path: Path, here: Here) -> BenchReport:
    record = _json(path)
    if "endpoint" in record and "base" not in record:
        raise DataError(
            f"{path} is about a server alone, whose heads are not known to be these",
            hint="measure these alongside it: `medusa-kit bench` without --endpoint-only",
        )
    report = _read(path, BenchReport.from_json, record, "bench", "bench --output FOLDER")
    _check_about(path, report.about, here, any(result.lossy for result in report.results))
    _tell_of_unknown(path, report.about, here)
    return report


def _verify(path: Path, here: Here) -> dict[str, VerifyReport]:
    """The reports of `verify`, by how tokens were chosen."""

    def read(record: dict[str, Any]) -> dict[str, VerifyReport]:
        parts = {"greedy": record["greedy"], **record}
        return {how: VerifyReport.from_json(part) for how, part in parts.items()}

    reports = _read(path, read, _json(path), "verify", "verify --output FILE")
    for report in reports.values():
        _check_about(path, report.about, here)
    _tell_of_unknown(path, reports["greedy"].about, here)
    return reports


def _read(path: Path, read: Callable[[Any], Report], record: Any, kind: str, by: str) -> Report:
    try:
        return read(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is no {kind} report: {first_found(error)}",
            hint=f"`medusa-kit {by}` writes one",
        ) from error
