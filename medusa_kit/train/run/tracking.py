"""Where metrics go besides metrics.jsonl: Weights & Biases, online or offline."""

from pathlib import Path
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train import distributed

RUN_ID = "wandb"  # in progress.json


class Tracking:
    """A run there; with logging.wandb false, and in all processes but the first, nothing."""

    def __init__(self, recipe: TrainRecipe, run_id: str | None = None) -> None:
        """`run_id`: of the run that this one goes on with. Raises as check_tracking does."""
        check_tracking(recipe)
        self._run: Any = None
        if not recipe.logging.wandb or not distributed.is_main():
            return
        import wandb

        Path(recipe.output_dir).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=recipe.logging.project,
            dir=recipe.output_dir,
            config=recipe.model_dump(),
            mode="offline" if recipe.logging.offline else None,
            id=run_id,
            resume=None if run_id is None else "allow",
        )

    @property
    def run_id(self) -> str | None:
        return getattr(self._run, "id", None)

    def log(self, line: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.log(line, step=line["step"])


def check_tracking(recipe: TrainRecipe) -> None:
    """Raises ConfigError when wandb is asked for but missing."""
    if not recipe.logging.wandb or not distributed.is_main():
        return
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "logging.wandb is true, but the package wandb is not installed",
            hint="pip install 'medusa-kit[train]', or add logging.wandb=false",
        ) from error
