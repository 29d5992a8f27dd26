"""The training phase: the recipe is decided once, then as many updates run as fit into the time."""

import math
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.origin import HEADS
from medusa_kit.errors import CheckpointError, MedusaKitError
from medusa_kit.files import parse_json, write_text
from medusa_kit.heads.checkpoint import stored_digest
from medusa_kit.infer.runners.backends import check_base
from medusa_kit.quick import plan, settings
from medusa_kit.quick.answers import read_answers
from medusa_kit.quick.plan import minutes
from medusa_kit.quick.session import Session
from medusa_kit.settings.recipe import TrainRecipe, dump, load_recipe
from medusa_kit.train.run.own_files import write_recipe
from medusa_kit.train.trainer import train

OFF = 0.05  # share by which the number of updates may be wrong before it is changed
TOLD = 0.2  # the same, before it is said again
SETTLED = 5  # updates after which their time counts
CHECKS = 20  # of the number of updates in a run
EVALUATIONS = 4
SAVE_SECONDS = (20.0, 600.0)
FIGURES = {
    "positions": "num_positions",
    "updates": "num_updates",
    "held_out": "held_out",
    "kept_acceptance_length": "kept_acceptance_length",
}  # by their names in run.json


def run_training(session: Session) -> dict[str, Any]:
    """Figures of the finished training. Goes on with a run that was interrupted."""
    finished = session.run / "run.json"
    if not finished.is_file():
        recipe = _recipe(session)
        pace = Pace(session, recipe)
        train(recipe, False, check_base, session.base_to_train, pace)
    try:
        record = parse_json(finished.read_text())
        figures = {name: record[key] for name, key in FIGURES.items()}
        read = figures["updates"] * settings.update_positions(session.base)
        session.state.note(HEADS, stored_digest(session.heads))
        return {**figures, "epochs": round(read / max(figures["positions"], 1), 2)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{finished} does not tell what was trained: {error}",
            hint="remove that folder to train again on the same answers",
        ) from error


def _recipe(session: Session) -> TrainRecipe:
    """The recipe in the folder, or one that is decided now and written there."""
    if session.recipe.is_file():
        _follow_move(session)
        return load_recipe(session.recipe)
    rates = session.rates
    answers = read_answers(session.answers)
    positions = sum(len(row.response_ids) for row in answers)
    seconds = session.remaining - plan.reserved(session.total)
    epochs, limit = plan.epochs_for(seconds, positions, rates), None
    if epochs < 1.0:  # less text, trained on once
        _check_useful(session, positions, seconds)
        share = seconds / rates.training(positions, 1.0)
        limit = max(2, int(len(answers) * share))
        positions, epochs = round(positions * min(1.0, limit / len(answers))), 1.0
        limit = limit if limit < len(answers) else None
        console.note(f"time is left for {positions:,} of the training tokens, once")
    epochs = min(epochs, settings.MAX_EPOCHS)
    trained = positions * rates.trained
    per_epoch = max(1, round(trained / settings.update_positions(session.base)))
    every = max(1, round(per_epoch * epochs / EVALUATIONS))
    each = rates.training(positions, epochs) / max(1.0, per_epoch * epochs)
    pause = min(max(SAVE_SECONDS[0], seconds / 10), SAVE_SECONDS[1])
    recipe = settings.recipe_for(
        session.base, session.request.output.resolve(), session.request.engine,
        earlier=session.earlier and session.earlier.resolve(),
        epochs=max(1, math.ceil(epochs)), limit=limit, eval_every=every,
        save_every=max(1, round(pause / max(each, 1e-6))),
    )  # fmt: skip
    write_text(session.recipe, _header(session) + dump(recipe))
    if session.earlier is not None:
        console.note(f"continuing from the heads in {session.earlier}")
    console.note(f"training on {positions:,} training tokens, about {epochs:.1f} epochs")
    return load_recipe(session.recipe)


def _check_useful(session: Session, positions: int, seconds: float) -> None:
    """Raises MedusaKitError where less is left of the time than heads need."""
    min_seconds = session.rates.training(min(positions, plan.MIN_POSITIONS), 1.0)
    if seconds >= min_seconds:
        return
    everything = session.rates.training(positions, 1.0)
    hours = plan.hours_for(everything, session.total - session.remaining)
    raise MedusaKitError(
        f"{minutes(max(0.0, seconds))} of {session.request.hours:g} hours are left to train in; "
        f"expected {minutes(min_seconds)} or more, and {minutes(everything)} for all {positions:,} "
        "training tokens",
        hint=f"give more time, and the answers are used: --hours {plan.rounded_up(hours)} or more",
    )


def _follow_move(session: Session) -> None:
    """Rewrites recipes that name another folder, where this one was moved or copied from it."""
    paths = settings.paths_in(session.request.output.resolve())
    for path, header in ((session.recipe, _header(session)), (session.run / "recipe.yaml", "")):
        recipe = load_recipe(path) if path.is_file() else None
        if recipe is None or recipe.output_dir == paths["output_dir"]:
            continue
        data, train = (getattr(recipe, part).model_copy(update=paths[part])
                       for part in ("data", "train"))  # fmt: skip
        update = {"output_dir": paths["output_dir"], "data": data, "train": train}
        moved = recipe.model_copy(update=update)
        if header:
            write_text(path, header + dump(moved))
        else:
            write_recipe(path.parent, moved)


def _header(session: Session) -> str:
    own = Path(session.request.output) / "recipe.yaml"
    return (
        "# Written by `medusa-kit train --quick`, which may run fewer updates than these epochs.\n"
        f"# To train by hand: medusa-kit train {own} output_dir=OTHER\n"
    )


class Pace:
    """How many updates fit into the remaining time, from how long they take; the schedule
    follows. Called by the training loop."""

    def __init__(self, session: Session, recipe: TrainRecipe) -> None:
        self.session, self.recipe = session, recipe
        self.rates = session.rates
        self.first: tuple[int, float] | None = None  # update and time where this process began
        self.said = 0  # updates, when they were last said
        self.max_updates = 0  # prompts may have run out before the time did

    def __call__(self, step: int, planned: int) -> int:
        now = self.session.clock()
        seconds = self.session.remaining - plan.reserved(self.session.total)
        if self.first is None:
            self.first, self.max_updates = (step, now), planned
            return planned if step else self._fitting(step, seconds, self._expected())
        done = step - self.first[0]
        if done % max(SETTLED, planned // CHECKS) or step >= planned:
            return planned
        updates = self._fitting(step, seconds, (now - self.first[1]) / done)
        if updates > planned and 2 * step > planned:
            return planned  # the learning rate has fallen already
        if abs(updates - planned) <= max(1.0, OFF * planned):
            return planned
        self._say(updates, planned, (now - self.first[1]) / done)
        return updates

    def _say(self, updates: int, planned: int, seconds: float) -> None:
        """A line where the number is another than was last said; small changes are not worth it."""
        known = self.said or planned
        if abs(updates - known) > TOLD * known:
            self.said = updates
            console.note(
                f"an update takes {seconds:.2f} s: the time is enough for {updates:,} updates, "
                f"not {known:,}"
            )

    def _expected(self) -> float:
        return plan.OVERHEAD * self.recipe.train.micro_batch_positions / self.rates.updates

    def _fitting(self, step: int, seconds: float, update_seconds: float) -> int:
        return min(
            self.max_updates, step + max(1, int(max(0.0, seconds) / max(update_seconds, 1e-9)))
        )
