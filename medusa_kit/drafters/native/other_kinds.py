"""Checkpoints that draft for one base only, known by their config: which are read, which not.

As a draft model they would be loaded wrongly, or fail with a message that gives another reason.
"""

from collections.abc import Mapping
from typing import Any

from medusa_kit.base.files import resolve
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError
from medusa_kit.infer.attention.watched_layers import decoder_layers
from medusa_kit.settings.drafters import DraftModelOptions

EAGLE_3, DFLASH = "an EAGLE-3 draft", "a DFlash draft"
EAGLE = "an EAGLE draft outside the format `eagle3` of speculators"
DFLASH_2, SPECULATORS = "a DFlash-2 draft", "a DFlash draft in the format of speculators"
WHY_NOT = {
    EAGLE: "does not say how its layer computes",
    DFLASH_2: "chooses tokens with networks that transformers lacks",
    SPECULATORS: "has a vocabulary of its own",
}

REWRITE = "`speculators convert --algorithm eagle3` rewrites EAGLE-3 drafts of its authors"
INSTEAD = (
    "name a small causal model, a DFlash or an EAGLE-3 draft, or use heads or the base's own MTP "
    "layers (--drafter mtp)"
)


def refuse_other_kinds(name: str) -> None:
    """Raises ConfigError for a draft model, a folder or a Hub id, of a kind that is not read. One
    whose config cannot be read is left to loading, which says why."""
    stored = stored_dict(name)
    if stored is not None and (kind := kind_of(stored)) in WHY_NOT:
        raise ConfigError(
            f"draft model {name!r} is {kind}, which {WHY_NOT[kind]}; that is not read yet",
            hint=REWRITE if kind == EAGLE else INSTEAD,
        )


def check_options(name: str, kind: str, options: DraftModelOptions) -> None:
    """Raises ConfigError for options of draft models that such a draft has no use for."""
    usual = DraftModelOptions()
    given = [key for key, value in options if value != getattr(usual, key)]
    if others := [key for key in given if key != "num_nodes"]:
        raise ConfigError(
            f"drafter draft-model: option {others[0]} was given, and {name!r} is {kind}, which "
            "writes a chain in its own way",
            hint="leave it out; --drafter-option num_nodes=N makes drafts shorter",
        )


def check_hands_over(base: BaseModel, kind: str) -> None:
    """Raises IncompatibleBaseError for a base whose layers cannot be watched."""
    if len(decoder_layers(base)) != base.config.num_hidden_layers:
        raise IncompatibleBaseError(
            f"{base.info.name!r} ({base.info.model_type}) keeps its decoder layers where they "
            f"cannot be found; {kind} has to read their outputs",
            hint="use another drafter",
        )


def stored_dict(name: str) -> dict[str, Any] | None:
    """What the config of a draft model says, as it is stored; None where it cannot be read."""
    from transformers import PreTrainedConfig

    try:
        source, folder = resolve(name, weights=False)
        if source not in ("folder", "hub"):
            return None
        return dict(PreTrainedConfig.get_config_dict(folder)[0])
    except (CheckpointError, AttributeError, OSError, RecursionError, TypeError, ValueError):
        return None  # no JSON, or no object


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Which of these a checkpoint is; None for an ordinary model."""
    speculators = str(config.get("speculators_model_type") or "").lower()
    named = config.get("architectures")
    text = (
        f"{' '.join(map(str, named)) if isinstance(named, list) else named} {speculators}".lower()
    )
    if "eagle" in text:
        return EAGLE_3 if speculators == "eagle3" else EAGLE
    if "dflash2" in text:
        return DFLASH_2
    if "dflash" in speculators:
        return SPECULATORS
    if "dflash" in text or "dflash_config" in config or "target_layer_ids" in config:
        return DFLASH
    return None
