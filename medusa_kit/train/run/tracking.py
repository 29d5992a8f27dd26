"""Where metrics go besides metrics.jsonl: Weights & Biases, online or offline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train import distributed

Logger = Callable[[dict[str, Any]], None]


def start_tracking(recipe: TrainRecipe) -> Logger:
    """Raises ConfigError when wandb is asked for but missing."""
    if not recipe.logging.wandb or not distributed.is_main():
        return lambda line: None
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "logging.wandb is true, but the package wandb is not installed",
            hint="pip install 'medusa-kit[train]', or add logging.wandb=false",
        ) from error
    Path(recipe.output_dir).mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=recipe.logging.project,
        dir=recipe.output_dir,
        config=recipe.model_dump(),
        mode="offline" if recipe.logging.offline else None,
    )
    return lambda line: run.log(line, step=line["step"])
