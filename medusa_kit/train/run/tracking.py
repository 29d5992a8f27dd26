"""Where metrics go besides metrics.jsonl: Weights & Biases, online or offline."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.errors import ConfigError, MedusaKitError, first_found
from medusa_kit.installing import extra
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.processes import distributed

RUN_ID = "wandb"  # in progress.json
FOLDER = "wandb"  # in output_dir, made by the library
NOT_IN_NAMES = "/\\#?%:"  # of projects
LONGEST = 128
SECONDS = 30  # that the service has to answer, before anything is loaded
HINT = (
    "`wandb login`, or set WANDB_API_KEY; logging.offline=true keeps the metrics in "
    "output_dir/wandb, to be synced later; logging.wandb=false leaves it out"
)


class Tracking:
    """A run there; without one it does nothing."""

    def __init__(self, run: Any = None) -> None:
        self._run = run

    @property
    def run_id(self) -> str | None:
        return getattr(self._run, "id", None)

    def log(self, line: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.log(line, step=line["step"])

    def finish(self, failed: bool) -> None:
        """Sends what is left. What goes wrong there is told and changes no training."""
        if self._run is None:
            return
        try:
            self._run.finish(**({"exit_code": 1} if failed else {}))
        except Exception as error:  # of the library, which has many kinds
            console.warn(f"wandb did not end its run: {first_found(error)}")


@contextlib.contextmanager
def tracked(recipe: TrainRecipe, run_id: str | None) -> Iterator[Tracking]:
    """A run of wandb's for as long as this one lasts, in the first process alone, where the recipe
    asks for one. `run_id`: of the run to go on with.

    Raises ConfigError in every process where wandb refuses, for whatever reason.
    """
    run, refused = None, None
    if recipe.logging.wandb and distributed.is_main():
        try:
            run = _begin(recipe, run_id)
        except MedusaKitError as error:
            refused = error
    if recipe.logging.wandb and (refused := distributed.from_main(refused)) is not None:
        raise refused
    tracking, failed = Tracking(run), True
    try:
        yield tracking
        failed = False
    finally:
        tracking.finish(failed)


def _begin(recipe: TrainRecipe, run_id: str | None) -> Any:
    """A run of our own, beside any that the calling program has."""
    check_tracking(recipe)
    import wandb

    folder = Path(recipe.output_dir)
    was_there = (folder / FOLDER).exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return wandb.init(
            project=recipe.logging.project,
            dir=recipe.output_dir,
            config=recipe.model_dump(),
            mode="offline" if recipe.logging.offline else None,
            id=run_id,
            resume=None if run_id is None else "allow",
            reinit="create_new",
            settings={"init_timeout": SECONDS},
        )
    except Exception as error:  # of wandb, pydantic, the network or the disk
        if not was_there:
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
        raise ConfigError(f"wandb refuses: {first_found(error)}", hint=HINT) from error


def check_tracking(recipe: TrainRecipe) -> None:
    """Raises ConfigError when wandb is asked for but missing, and for a project that has no name as
    it takes them."""
    if not recipe.logging.wandb or not distributed.is_main():
        return
    project = recipe.logging.project
    if not project or len(project) > LONGEST or set(NOT_IN_NAMES) & set(project):
        raise ConfigError(
            f"logging.project {project!r} is no name of a project; expected 1 to {LONGEST} "
            f"characters and none of {' '.join(NOT_IN_NAMES)}",
            hint="for example logging.project=medusa-kit; WANDB_ENTITY names a team",
        )
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "logging.wandb is true, but the package wandb is not installed",
            hint=f"{extra('train')}, or add logging.wandb=false",
        ) from error
