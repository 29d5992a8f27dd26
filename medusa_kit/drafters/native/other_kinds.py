"""Checkpoints that draft for one base only and are not read yet, known by their config.

As a draft model they would be loaded wrongly, or fail with a message that gives another reason.
"""

from collections.abc import Mapping
from typing import Any

from medusa_kit.base.files import resolve
from medusa_kit.errors import CheckpointError, ConfigError

EAGLE, DFLASH = "an EAGLE-3 draft", "a DFlash draft"
NEEDS = {
    EAGLE: "reads the base's hidden states after three of its layers",
    DFLASH: "reads the base's hidden states after several of its layers",
}


def refuse_other_kinds(name: str) -> None:
    """Raises ConfigError for a draft model, a folder or a Hub id, that is no model of its own. One
    whose config cannot be read is left to loading, which says why."""
    from transformers import PreTrainedConfig

    try:
        source, place = resolve(name, weights=False)
        if source not in ("folder", "hub"):
            return
        config, _ = PreTrainedConfig.get_config_dict(place)
    except (CheckpointError, OSError, ValueError):
        return
    if (kind := kind_of(config)) is not None:
        raise ConfigError(
            f"draft model {name!r} is {kind}, which {NEEDS[kind]}; steps hand drafters the last "
            "one alone",
            hint="name a small causal model, or use heads or the base's own MTP layers (drafter "
            "mtp)",
        )


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Which of these a checkpoint is; None for an ordinary model."""
    words = [*(config.get("architectures") or ()), config.get("speculators_model_type") or ""]
    said = " ".join(map(str, words)).lower()
    if "eagle" in said:
        return EAGLE
    if "dflash" in said or "dflash_config" in config or "target_layer_ids" in config:
        return DFLASH
    return None
