"""Nothing that is kept of one precision of activations is taken for another's."""

import json
from pathlib import Path

import pytest
from support.debug_model import ROOT
from support.kernels.rounded_engine import (
    FLOAT32,
    ROUNDED,
    needs_integers,
    quantised_base,
    rounded_engine,
)
from support.rank_tables import random_statistics
from support.small_engines import BUSHY, random_heads, random_prompt, reusing

from medusa_kit.base.model import BaseModel
from medusa_kit.data.readers import AnswerRow
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.tree_precision import note_if_precision_differs
from medusa_kit.heads import save_heads
from medusa_kit.infer.decode.measured import MeasuredSteps
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree
from medusa_kit.tuning.results import take_statistics
from medusa_kit.tuning.tree_search import judge_tree

pytestmark = needs_integers
ALL = (FLOAT32, *ROUNDED)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BaseModel:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    return quantised_base(tmp_path)


@pytest.fixture
def engines(base: BaseModel) -> dict[str, Engine]:
    return {name: rounded_engine(base, name) for name in ALL}


def test_step_times_and_checks_lie_in_files_of_their_own(engines: dict[str, Engine]) -> None:
    found = list[tuple[Path, Path]]()
    for engine in engines.values():
        record = engine.verifier.check_record()
        assert record is not None
        found.append((MeasuredSteps(engine.verifier)._record.path, record.path))
    times, checks = zip(*found, strict=True)
    assert len(set(times)) == len(set(checks)) == len(ALL)
    assert len({engine.steps_run_by for engine in engines.values()}) == len(ALL)


def test_a_remembered_check_is_of_its_own_precision(base: BaseModel) -> None:
    errors = list[float]()
    for name in ALL * 2:
        engine = rounded_engine(base, name)
        errors.append(engine.check.relative_error)
        assert engine.check.remembered == (len(errors) > len(ALL)), name
    assert errors[: len(ALL)] == errors[len(ALL) :]
    assert errors[0] < errors[1] < errors[2]


def test_what_one_has_read_is_not_the_others_prefix(engines: dict[str, Engine]) -> None:
    kept, prompt = reusing(next(iter(engines.values())).verifier), random_prompt(20, seed=1)
    for name, engine in engines.items():
        engine.scheduler = kept
        first, again = (engine.generate(prompt, max_new_tokens=4) for _ in range(2))
        assert (first.stats.cached_tokens, again.token_ids) == (0, first.token_ids), name
        assert again.stats.cached_tokens > 0, name


def test_statistics_are_of_float32_whatever_the_engine(
    engines: dict[str, Engine], tmp_path: Path
) -> None:
    """They are taken of the base, so there is nothing to refuse."""
    answers = [
        AnswerRow(random_prompt(4, seed), random_prompt(20, 50 + seed), "length", "x", seed)
        for seed in range(3)
    ]
    written = list[bytes]()
    for name, engine in engines.items():
        folder = tmp_path / name
        folder.mkdir()
        take_statistics(engine, answers, folder, "some", 4)
        written.append((folder / "statistics.npz").read_bytes())
    assert len(set(written)) == 1


def test_a_tree_says_in_which_precision_it_was_found(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, statistics = random_heads(base, 3), random_statistics(0, [9, 14])
    save_heads(heads, tmp_path / "heads")
    tree = CandidateTree.chain(2)
    for found in ALL:
        engine = rounded_engine(base, found, heads=heads)
        extra = json.loads(json.dumps(judge_tree(engine, statistics, tree).as_extra(engine)))
        assert (extra["activations"], extra["base_weights"]) == (found, "checkpoint")
        save_tree(tree, tmp_path / "heads/tree.json", extra)
        capsys.readouterr()
        for name in ALL:
            rounded_engine(base, name, heads=tmp_path / "heads")
            said = " ".join(capsys.readouterr().err.split())
            told = f"tree.json was found with {found} activations; with {name} another tree"
            assert (told in said) == (name != found), said


@pytest.mark.parametrize("given", [True, False])
def test_older_trees_were_found_in_float32(
    base: BaseModel, given: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that no search has found say nothing."""
    heads = random_heads(base)
    save_heads(heads, tmp_path)
    for extra, told in (({"table": []}, True), ({}, False)):
        save_tree(BUSHY, tmp_path / "tree.json", extra)
        capsys.readouterr()
        options = {"heads": heads, "tree": tmp_path / "tree.json"} if given else {"heads": tmp_path}
        for name in ALL:
            rounded_engine(base, name, **options)
            said = "was found with float32" in " ".join(capsys.readouterr().err.split())
            assert said == (told and name != FLOAT32)


def test_nothing_is_said_of_a_tree_of_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shipped, *_) = (ROOT / "medusa_kit/assets/heads").glob("*/tree.json")
    own = tmp_path / "tree.json"
    own.write_bytes(shipped.read_bytes())
    for tree, told in ((shipped, False), (own, True)):
        for activations in ALL:
            note_if_precision_differs(tree, activations)
        said = " ".join(capsys.readouterr().err.split())
        assert ("another tree may be faster" in said) == told
        assert ("a file that you write with the lines `model: …`, `heads: …`" in said) == told
