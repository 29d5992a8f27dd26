"""Heads trained by the demo: the model's own answers, a fixed number of updates, a tree."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medusa_kit import console
from medusa_kit.data.readers import Row
from medusa_kit.demo.curve import Point, read_curve
from medusa_kit.demo.work import Deadline, Work
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import with_heads
from medusa_kit.files import parse_json, write_text
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.infer.runners.backends import check_base
from medusa_kit.quick import settings
from medusa_kit.quick.answers import Written, answer, read_answers
from medusa_kit.quick.prompts import read_prompts
from medusa_kit.quick.search import plain_step
from medusa_kit.settings.recipe import TrainRecipe, dump, load_recipe
from medusa_kit.train.run.own_files import METRICS, write_recipe
from medusa_kit.train.trainer import train
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tuning.results import take_statistics, write_search
from medusa_kit.tuning.tree_search import search_tree

FIRST_ROUND, ROUND = 16, 48  # answers written together: before their speed is known, then at most
CURVE_SHARE = 0.125  # of the answers: not trained on, for the points of the curve
SIZES, FEW = (1, 2, 4, 8, 16), (1, 4)  # of trees, in nodes; where time is short
TIMED = 1000  # plain steps that take as long as the search among SIZES, about
SETTLED = 5  # updates after which their time counts


@dataclass(frozen=True)
class DemoFiles:
    """The paths of all files in the demo's folder."""

    folder: Path

    @property
    def record(self) -> Path:
        return self.folder / "demo.json"

    @property
    def shipped(self) -> Path:
        return self.folder / "shipped"

    @property
    def held_out(self) -> Path:
        return self.folder / "held_out.jsonl"

    @property
    def answers(self) -> Path:
        return self.folder / settings.ANSWERS

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def heads(self) -> Path:
        return self.run / "heads"

    @property
    def curve(self) -> Path:
        return self.folder / "curve.png"


@dataclass(frozen=True)
class Trained:
    """What was done of the work, by this run and earlier ones."""

    answers: int
    tokens: int  # of the answers
    updates: int
    curve: list[Point]
    before: bool  # all of it by an earlier run


def train_own(engine: Engine, work: Work, files: DemoFiles, deadline: Deadline) -> Trained:
    """Write answers, train heads, find a tree; each goes on where an earlier run stopped.

    Raises what these do.
    """
    before = _finished(files)
    if not before:
        _write_answers(engine, work, files, deadline)
        recipe = recipe_for(engine, work, files)
        train(recipe, False, check_base, base_for_decoding, _Pace(work, deadline))
    if not (files.heads / "tree.json").is_file():
        _find_tree(engine, files, deadline)
    rows = read_answers(files.answers)
    tokens = sum(len(row.response_ids) for row in rows)
    updates = parse_json((files.run / "run.json").read_text())["num_updates"]
    return Trained(len(rows), tokens, updates, read_curve(files.run / METRICS), before)


def _finished(files: DemoFiles) -> bool:
    return (files.run / "run.json").is_file()


def _write_answers(engine: Engine, work: Work, files: DemoFiles, deadline: Deadline) -> None:
    if files.recipe.is_file():
        return  # training began on the answers that are there
    prompts = read_prompts(str(work.prompts))
    plan: tuple[tuple[str, list[Row], Path, int], ...] = (
        ("held-out prompts, for the tree", prompts.calibration, files.held_out, work.held_out),
        ("prompts to train on", prompts.training, files.answers, work.answers),
    )
    for name, questions, path, count in plan:
        console.note(f"the model answers {min(count, len(questions))} {name}")
        answer(engine.base, questions, path, _more(count, deadline), deadline.clock)


def _more(count: int, deadline: Deadline) -> Callable[[Written], int]:
    def more(written: Written) -> int:
        remaining = count - written.num_prompts
        if written.rate is None:
            return min(remaining, FIRST_ROUND)
        fitting = int(max(0.0, deadline.remaining("answers")) * written.rate / written.length)
        return min(remaining, ROUND, fitting)

    return more


def recipe_for(engine: Engine, work: Work, files: DemoFiles) -> TrainRecipe:
    """The recipe of `train --quick`, with enough epochs for the demo's updates. It is decided once
    and written, so that a run that is resumed trains as it began, wherever its folder lies now."""
    if not files.recipe.is_file():
        write_text(files.recipe, dump(_new_recipe(engine, work, files)))
    write_text(files.recipe, dump(_moved(load_recipe(files.recipe), files)))
    if (own := files.run / "recipe.yaml").is_file():
        write_recipe(files.run, _moved(load_recipe(own), files))
    return load_recipe(files.recipe)


def _new_recipe(engine: Engine, work: Work, files: DemoFiles) -> TrainRecipe:
    rows = read_answers(files.answers)
    tokens = sum(len(row.response_ids) for row in rows) * (1 - CURVE_SHARE)
    per_epoch = max(1, int(tokens) // settings.update_positions(engine.base))
    every = max(1, work.updates // work.evaluations)
    recipe = settings.recipe_for(
        engine.base, files.folder.resolve(), epochs=-(-work.updates // per_epoch) + 1,
        eval_every=every, save_every=every,
    )  # fmt: skip
    data = recipe.data.model_copy(update={"eval_fraction": CURVE_SHARE})
    return recipe.model_copy(update={"data": data})


def _moved(recipe: TrainRecipe, files: DemoFiles) -> TrainRecipe:
    """The recipe with the paths of the folder as it is now."""
    paths = settings.paths_in(files.folder.resolve())
    parts = {name: getattr(recipe, name).model_copy(update=paths[name])
             for name in ("data", "train")}  # fmt: skip
    return recipe.model_copy(update={"output_dir": paths["output_dir"], **parts})


class _Pace:
    """The demo's number of updates, or as many as fit. Called by the training loop."""

    def __init__(self, work: Work, deadline: Deadline) -> None:
        self.work, self.deadline = work, deadline
        self.first: tuple[int, float] | None = None  # update and time where this process began

    def __call__(self, step: int, planned: int) -> int:
        now, planned = self.deadline.clock(), min(planned, self.work.updates)
        if self.first is None:
            self.first = (step, now)
        done = step - self.first[0]
        if done < SETTLED:
            return planned
        seconds = max(0.0, self.deadline.remaining("training"))
        fitting = step + int(seconds * done / max(now - self.first[1], 1e-9))
        return min(planned, fitting)


def _find_tree(engine: Engine, files: DemoFiles, deadline: Deadline) -> None:
    """Find a tree and write it; dynamic trees are tried too where there is time for them."""
    rows = read_answers(files.held_out)
    step = plain_step(engine, rows[0].prompt_ids)
    enough_time = TIMED * step < deadline.remaining("heads")
    sizes, dynamic = (SIZES, max(SIZES)) if enough_time else (FEW, None)
    with_own = with_heads(engine, files.heads, tree=CandidateTree.root_only())
    statistics = take_statistics(with_own, rows, None, files.held_out.name, dynamic)
    write_search(with_own, search_tree(with_own, statistics, sizes), files.heads, statistics)
