"""What a base that carries a state from token to token cannot be trained with."""

from typing import Any

from medusa_kit.base.families import needs_chains
from medusa_kit.errors import ConfigError
from medusa_kit.settings.recipe import TrainRecipe


def check_states(config: Any, recipe: TrainRecipe) -> None:
    """Raises ConfigError for options of the recipe that need attention alone."""
    if (why := needs_chains(config)) is None:
        return
    impossible = {
        "train.packing": (recipe.train.packing, "a row's state would pass to the next one"),
        "train.runners_up": (recipe.train.runners_up, "a runner-up would change those behind it"),
    }
    for name, (value, because) in impossible.items():
        if value:
            raise ConfigError(
                f"{name} {value} on {config.get_text_config().model_type}: {why}; {because}",
                hint=f"{name}=false",
            )
