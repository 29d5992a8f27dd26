"""Checkpoints of DFlash drafts: which they are, whether they fit a base, and their model.

transformers has one class of model for them. Checkpoints in the form of DFlash's authors
(`DFlashDraftModel`, Qwen3's sizes and a section `dflash_config`) hold the same tensors under other
names, and are read as that class.
"""

from collections.abc import Mapping
from typing import Any

from medusa_kit.base.files import resolve
from medusa_kit.base.mapped import copy_mapped
from medusa_kit.base.model import BaseModel
from medusa_kit.drafters.native.damaged import (
    check_layers,
    check_numbers,
    loading,
    reading_config,
    wrong_sizes,
)
from medusa_kit.drafters.native.other_kinds import DFLASH, check_hands_over, kind_of, stored_dict
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError
from medusa_kit.locks import building_models

AUTHORS = "DFlashDraftModel"
# How tensors are called there, and in transformers.
KEYS = {r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters",
         "max_position_embeddings", "hidden_act", "block_size")  # fmt: skip
HINT = "name a DFlash draft that was trained for this base, or use another drafter"


def dflash_config(name: str) -> Any | None:
    """transformers' config of the DFlash draft of this name; None for another model. Raises
    ConfigError for one in a form that is not read."""
    stored = stored_dict(name)
    if stored is None or kind_of(stored) != DFLASH:
        return None
    try:
        from transformers import MuseGlimmerAssistantConfig
    except ImportError as error:
        raise ConfigError(
            "this version of transformers cannot load DFlash drafts",
            hint="install transformers 5.23 or later",
        ) from error

    check_layers(name, DFLASH, stored.get("num_hidden_layers", 1))
    with reading_config(name, DFLASH):
        if AUTHORS in (stored.get("architectures") or ()):
            return _from_authors(name, stored)
        return MuseGlimmerAssistantConfig.from_dict(stored)


def layers_read(config: Any | None) -> tuple[int, ...]:
    """The base's layers that a draft with this config reads, in order."""
    return () if config is None else tuple(sorted(set(config.target_layer_ids)))


def _from_authors(name: str, stored: dict[str, Any]) -> Any:
    """transformers' config of a checkpoint in the form of DFlash's authors."""
    from transformers import MuseGlimmerAssistantConfig, Qwen3Config

    sizes = Qwen3Config.from_dict(stored)  # fills in what a file leaves out
    _check_form(name, sizes)
    own: Mapping[str, Any] = stored.get("dflash_config") or {}
    return MuseGlimmerAssistantConfig(
        **{key: getattr(sizes, key) for key in SIZES},
        layer_types=["full_attention"] * sizes.num_hidden_layers,
        **{key: own.get(key, stored.get(key)) for key in ("mask_token_id", "target_layer_ids")},
    )


def _check_form(name: str, config: Any) -> None:
    """Raises ConfigError for what transformers' class does not compute."""
    found = [
        what
        for what, there in (
            ("biases in attention", config.attention_bias),
            ("attention over a window", set(config.layer_types or ()) - {"full_attention"}),
            ("causal attention", getattr(config, "is_causal", False)),
            ("scaled embeddings", getattr(config, "input_embedding_scale", 1.0) != 1.0),
        )
        if there
    ]
    if found:
        raise ConfigError(
            f"draft model {name!r} is {DFLASH} with {found[0]}, which transformers' class lacks",
            hint="use another drafter",
        )


def check_fits(name: str, draft: Any, base: Any) -> None:
    """Hold a draft's config against its base's, which may both be known before anything is loaded.
    Raises IncompatibleBaseError."""
    last, vocabulary = base.num_hidden_layers - 1, base.vocab_size
    layers = draft.target_layer_ids or []
    wrong = None
    if draft.hidden_size != base.hidden_size:
        wrong = f"has hidden size {draft.hidden_size}; that of the base is {base.hidden_size}"
    elif not layers or not all(0 <= layer < last for layer in layers):
        # The last layer's output, which transformers hands over normed, is in no known draft.
        wrong = f"reads the base's layers {layers}; expected some of 0 to {last - 1}"
    elif not 0 <= draft.mask_token_id < vocabulary:
        wrong = f"has mask token {draft.mask_token_id}; the base has {vocabulary} tokens"
    elif not 2 <= draft.block_size <= draft.max_position_embeddings:
        positions = draft.max_position_embeddings
        wrong = f"has blocks of {draft.block_size} tokens; expected 2 to its {positions} positions"
    else:
        wrong = wrong_sizes(draft)
    if wrong is not None:
        raise IncompatibleBaseError(f"DFlash draft {name!r} {wrong}", hint=HINT)


def load_dflash(name: str, config: Any, base: BaseModel) -> Any:
    """transformers' model of a draft, on the base's device and in its dtype. Raises
    CheckpointError, IncompatibleBaseError."""
    from transformers import AutoModel

    check_fits(name, config, base.config)
    check_hands_over(base, DFLASH)
    with loading(name, DFLASH), building_models:
        model, report = AutoModel.from_pretrained(
            resolve(name)[1], config=config, key_mapping=KEYS, dtype=base.dtype,
            device_map={"": base.device}, output_loading_info=True,
        )  # fmt: skip
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"DFlash draft {name!r} lacks {len(missing)} tensors, among them {missing[0]!r}",
            hint="a file of weights may be missing",
        )
    check_numbers(name, DFLASH, model)
    copy_mapped(model)
    return model.eval().requires_grad_(False)
