"""Draft models that read layers of their base: which kind a name is of, and what each kind needs.

The kinds are DFlash and EAGLE-3; `other_kinds` has those that are refused.
"""

from typing import Any

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.native import dflash, dflash_files, eagle
from medusa_kit.drafters.native.damaged import SAFETENSORS, WEIGHTS, check_weights
from medusa_kit.drafters.native.dflash import DFlashDrafter
from medusa_kit.drafters.native.eagle import EagleConfig, EagleDrafter
from medusa_kit.drafters.native.other_kinds import DFLASH, EAGLE_3
from medusa_kit.settings.drafters import DraftModelOptions


def draft_config(name: Any) -> Any | None:
    """The config of such a draft; None for another model, or what names none. Raises ConfigError
    for one in a form that is not read."""
    if not isinstance(name, str):
        return None
    config = dflash_files.dflash_config(name)
    return eagle.eagle_config(name) if config is None else config


def kind(config: Any) -> str:
    return EAGLE_3 if isinstance(config, EagleConfig) else DFLASH


def is_there(name: str) -> bool:
    """Whether this names such a draft. Raises ConfigError for one in a form that is not read,
    CheckpointError for one whose weights are missing or cut off."""
    if (config := draft_config(name)) is None:
        return False
    # DFlash drafts are read by transformers, which knows both kinds of files.
    suffixes = (SAFETENSORS,) if isinstance(config, EagleConfig) else WEIGHTS
    check_weights(name, kind(config), suffixes)
    return True


def layers_read(config: Any | None, base: Any) -> tuple[int, ...]:
    """The layers of a base with the config `base` that such a draft reads, in order."""
    if isinstance(config, EagleConfig):
        return tuple(sorted(set(config.outputs(base))))
    return dflash_files.layers_read(config)


def check_fits(name: str, config: Any, base: Any) -> None:
    """Raises IncompatibleBaseError for a draft that is none of a base with the config `base`."""
    check = eagle.check_fits if isinstance(config, EagleConfig) else dflash_files.check_fits
    check(name, config, base)


def build(
    context: DraftContext, name: str, config: Any, options: DraftModelOptions
) -> DFlashDrafter | EagleDrafter:
    """Raises ConfigError for options without a meaning there, and what loading raises."""
    if isinstance(config, EagleConfig):
        return eagle.build(context, name, config, options)
    return dflash.build(context, name, config, options)
