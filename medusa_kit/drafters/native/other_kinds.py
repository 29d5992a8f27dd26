"""Checkpoints that draft for one base only, known by their config: which are read, which not.

As a draft model they would be loaded wrongly, or fail with a message that gives another reason.
"""

from collections.abc import Mapping
from typing import Any

from medusa_kit.base.files import resolve
from medusa_kit.errors import CheckpointError, ConfigError

EAGLE, DFLASH = "an EAGLE-3 draft", "a DFlash draft"
DFLASH_2, SPECULATORS = "a DFlash-2 draft", "a DFlash draft in the format of speculators"
WHY_NOT = {
    EAGLE: "drafts token by token with a layer, an embedding and a vocabulary of its own",
    DFLASH_2: "chooses tokens with networks that transformers lacks",
    SPECULATORS: "has a vocabulary of its own",
}


def refuse_other_kinds(name: str) -> None:
    """Raises ConfigError for a draft model, a folder or a Hub id, of a kind that is not read. One
    whose config cannot be read is left to loading, which says why."""
    stored = stored_dict(name)
    if stored is not None and (kind := kind_of(stored)) in WHY_NOT:
        raise ConfigError(
            f"draft model {name!r} is {kind}, which {WHY_NOT[kind]}; that is not read yet",
            hint="name a small causal model or a DFlash draft, or use heads or the base's own MTP "
            "layers (drafter mtp)",
        )


def stored_dict(name: str) -> dict[str, Any] | None:
    """What the config of a draft model says, as it is stored; None where it cannot be read."""
    from transformers import PreTrainedConfig

    try:
        source, place = resolve(name, weights=False)
        if source not in ("folder", "hub"):
            return None
        return dict(PreTrainedConfig.get_config_dict(place)[0])
    except (CheckpointError, OSError, ValueError):
        return None


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Which of these a checkpoint is; None for an ordinary model."""
    speculators = str(config.get("speculators_model_type") or "").lower()
    said = " ".join(map(str, [*(config.get("architectures") or ()), speculators])).lower()
    if "eagle" in said:
        return EAGLE
    if "dflash2" in said:
        return DFLASH_2
    if "dflash" in speculators:
        return SPECULATORS
    if "dflash" in said or "dflash_config" in config or "target_layer_ids" in config:
        return DFLASH
    return None
