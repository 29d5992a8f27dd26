"""The layers of a checkpoint that predict further tokens (multi-token prediction).

Models with such layers leave them out when they are loaded (transformers'
`_keys_to_ignore_on_load_unexpected`), so they are read from the checkpoint here, by transformers'
own `MtpModel`.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.faults.finite import damage_in
from medusa_kit.base.mapped import copy_mapped
from medusa_kit.base.model import BaseModel
from medusa_kit.base.stored_tensors import INDEX, WEIGHTS
from medusa_kit.drafters.memory import Memory
from medusa_kit.errors import CheckpointError, IncompatibleBaseError, MedusaKitError
from medusa_kit.files import parse_json
from medusa_kit.locks import building_models

# How configs call the number of these layers; transformers reads the first one only.
COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
HINT = "use another drafter, or a checkpoint that has them"


def num_layers(config: Any) -> int:
    """How many MTP layers a base with this config may have, 0 for none."""
    found = (getattr(config, name, None) for name in COUNTS)
    return next((count for count in found if isinstance(count, int) and count > 0), 0)


def why_none(base: BaseModel) -> str | None:
    """Why a base has no such layers to draft with; None where its checkpoint holds them."""
    count = num_layers(base.config)
    if not count:
        return f"{base.info.name!r} has no layers for multi-token prediction"
    if (folder := _folder(base)) is None:
        return f"the checkpoint of {base.info.name!r} cannot be read for its MTP layers"
    pattern = _pattern(base.config)
    if not any(pattern.search(name) for name in _names(folder)):
        return (
            f"the checkpoint of {base.info.name!r} lacks the {count} MTP layers that its config "
            "names"
        )
    return None


def layers_or_error(base: BaseModel, memory: Memory) -> tuple[Any, MedusaKitError | None]:
    """(layers, None), or (None, why there are none), found out once for each `memory`."""

    def seek() -> tuple[Any, MedusaKitError | None]:
        try:
            return load_layers(base), None
        except (IncompatibleBaseError, CheckpointError) as error:
            # A new one holds no frames of the attempt.
            return None, type(error)(error.message, hint=error.hint)

    layers, error = memory.loaded.remembered("MTP layers", seek)
    if layers is not None and layers.number != base.number:  # embeddings may have been replaced
        layers.tie_with_main_model(base.own_model)
        layers.number = base.number
    return layers, error


def load_layers(base: BaseModel) -> Any:
    """transformers' MtpModel of this base, on its device and in its dtype, sharing its embeddings.

    Raises IncompatibleBaseError, with what is missing; CheckpointError for weights that are no
    numbers.
    """
    if (why := why_none(base)) is not None:
        raise IncompatibleBaseError(why, hint=HINT)
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise IncompatibleBaseError(
            "this version of transformers cannot load MTP layers",
            hint="install transformers 5.23 or later",
        ) from error

    with building_models:
        try:
            with torch.device("meta"):  # the base's own norms may have been replaced
                skeleton = type(base.own_model)._from_config(_as_transformers_reads_it(base))
            # Else transformers would read the layers of the models alone whose sizes it knows.
            skeleton._keys_to_ignore_on_load_unexpected = {_pattern(base.config).pattern}
            layers = MtpModel.from_pretrained(skeleton, device_map={"": base.device})
        except (RuntimeError, ValueError, KeyError, AttributeError) as error:
            raise IncompatibleBaseError(
                f"the MTP layers of {base.info.name!r} cannot be loaded: {error}", hint=HINT
            ) from error
    if (found := damage_in(layers.layers.named_parameters())) is not None:
        raise CheckpointError(
            f"the MTP layers of {base.info.name!r} are damaged: {found}",
            hint="copy the checkpoint again, or draft without them: --drafter suffix, for example",
        )
    copy_mapped(layers)
    layers.tie_with_main_model(base.own_model)
    layers.number = base.number
    return layers.eval().requires_grad_(False)


def _as_transformers_reads_it(base: BaseModel) -> Any:
    """A copy of its config in which the MTP layers are named as transformers asks for them."""
    config = copy.deepcopy(base.own_model.config)
    config.name_or_path, config.dtype = str(_folder(base)), base.dtype
    text = config.get_text_config()
    count = num_layers(text)
    text.num_mtp_layers, text.dtype = count, base.dtype
    for kinds, own_key in (
        ("layer_types", "mtp_layer_types"),
        ("mlp_layer_types", "mtp_mlp_layer_types"),
    ):
        listed = getattr(text, kinds, None)
        if listed is not None and getattr(text, own_key, None) is None:
            # They are made as the last layer of the base, but none of them carries a state.
            kind = "full_attention" if kinds == "layer_types" else listed[-1]
            setattr(text, own_key, [kind] * count)
    return config


def _pattern(config: Any) -> re.Pattern[str]:
    """Names of their tensors: layers after the base's last, or an `mtp` of their own."""
    first = config.num_hidden_layers
    numbers = "|".join(str(first + index) for index in range(num_layers(config)))
    return re.compile(rf"(^|\.)mtp\.|(^|\.)layers\.({numbers})\.")


def _folder(base: BaseModel) -> Path | None:
    """Where the base's files lie on this machine."""
    config = base.config if base.is_light else base.own_model.config
    folder = Path(config.name_or_path or "")
    if (folder / "config.json").is_file():
        return folder
    if base.info.source != "hub":
        return None
    from transformers.utils import cached_file

    try:
        found = cached_file(base.info.name, "config.json", revision=base.info.revision)
    except OSError:
        return None
    return None if found is None else Path(found).parent


def _names(folder: Path) -> Iterator[str]:
    """The names of the tensors in a folder's safetensors files."""
    if (folder / INDEX).is_file():
        yield from parse_json((folder / INDEX).read_text())["weight_map"]
    elif (folder / WEIGHTS).is_file():
        from safetensors import safe_open

        with safe_open(folder / WEIGHTS, framework="pt") as file:
            yield from file.keys()
