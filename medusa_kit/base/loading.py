"""Loads a base model by the name that a person gives."""

from pathlib import Path
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.base import adapters, gguf_on_device
from medusa_kit.base import gguf as embedded
from medusa_kit.base.faults.small_files import AGAIN
from medusa_kit.base.files import (
    dtype_of_gguf,
    from_pretrained,
    gguf_source,
    not_found,
    quiet_transformers,
    resolve,
    tokenizer_of,
    whole_name,
)
from medusa_kit.base.fingerprint import Fingerprint
from medusa_kit.base.mapped import copy_mapped
from medusa_kit.base.model import VARIANT_KEY, BaseModel
from medusa_kit.base.placement import AUTO, pick_device, requested_dtype
from medusa_kit.base.remembered_configs import read_tokenizer
from medusa_kit.errors import CheckpointError, MedusaKitError
from medusa_kit.settings.engine import check_value
from medusa_kit.usual_device import on_usual_device

HOST = torch.device("cpu")
PERSONS_FILES = ("folder", "adapter")  # sources, of weights that may be written over


@on_usual_device
def load_base_model(
    name: str,
    *,
    dtype: str = AUTO,
    device: str = AUTO,
    revision: str | None = None,
    attention: str | None = None,
    four_bit: bool = False,
    check: bool = False,
) -> BaseModel:
    """Load a base model and its tokenizer.

    `name`: a Hub id, a local folder (of a model, or of an adapter that Medusa-2 trained), a GGUF
    file, `smollm2-135m-instruct` (the embedded one), what `make model` fetched, by its name, or
    `debug-tiny` (random weights). `dtype`: auto
    is the checkpoint's own on CUDA, bfloat16 of a GGUF file there, and float32 elsewhere
    (base/placement.py). `device`: auto
    takes CUDA where there is one. `attention`: transformers' name for it; by default SDPA
    where the family has it. `four_bit`: through bitsandbytes, on a GPU. `check`: the model anew,
    even if it passed on this machine before.
    Raises CheckpointError (missing, cut off, unreadable), IncompatibleBaseError, ConfigError.
    """
    check_value("dtype", dtype)
    quiet_transformers()
    target_device = pick_device(device)
    target_dtype = requested_dtype(dtype, target_device)
    source, model, tokenizer, known = _load(
        name, target_dtype, revision, attention, four_bit, target_device
    )
    model = model if four_bit else _on_device(model, target_device)
    if source in PERSONS_FILES:
        copy_mapped(model)
    base = BaseModel(model, tokenizer, whole_name(name, source), source, revision, known, check)
    if target_dtype == AUTO:
        whose = "as GGUF files are" if gguf_source(name) else "its checkpoint's dtype"
        console.note(f"{name} is loaded in {base.info.dtype}, {whose} (auto on CUDA)")
    return base


def _on_device(model: Any, device: torch.device) -> Any:
    """The model on `device`; a quantised model that cannot be moved stays where it was loaded."""
    try:
        return model.to(device)
    except (ValueError, NotImplementedError):
        if not getattr(model, "is_quantized", False):
            raise
        return model


def _load(
    name: str,
    dtype: torch.dtype | str,
    revision: str | None,
    attention: str | None,
    four_bit: bool = False,
    device: torch.device = HOST,
) -> tuple[str, Any, Any, Fingerprint | None]:
    """(source, model, tokenizer, None). For an adapter: its base with the adapter merged, and the
    fingerprint last, since merged weights are rounded differently in every dtype. `device`: where
    weights may be dequantised.
    """
    gguf = gguf_source(name)
    if gguf is not None:
        dtype = dtype_of_gguf(gguf) if isinstance(dtype, str) else dtype
        plain = attention is None and not four_bit
        if plain and device.type == "cuda" and gguf_on_device.loads_there(gguf):
            source, location = resolve(name, weights=False)
            model = gguf_on_device.model_on(gguf, Path(location), dtype, device)
            return source, model, tokenizer_of(location), None
    source, location = resolve(name)
    if source == "debug":
        model, tokenizer = embedded.debug_model()
        return source, model if isinstance(dtype, str) else model.to(dtype), tokenizer, None
    if source != "adapter":
        return source, *from_pretrained(location, dtype, revision, attention, four_bit), None
    info, folder = adapters.read_info(Path(location)), Path(location)
    _, model, tokenizer, known = _load(info["base_model"], dtype, info["revision"], attention)
    base = BaseModel(model, tokenizer, info["base_model"], "memory", known=known)
    adapters.check_base(info, base.info.fingerprint, folder)
    variant = adapters.variant_of(folder)
    known = base.adapted_fingerprint(variant)
    model = adapters.merge_into(model, folder)
    setattr(model.config.get_text_config(), VARIANT_KEY, variant)
    return source, model, tokenizer, known


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """Only the tokenizer of a base model. Raises CheckpointError."""
    quiet_transformers()
    source, location = resolve(name, weights=False)
    if source == "debug":
        return embedded.byte_tokenizer()
    if source == "adapter":
        info = adapters.read_info(Path(location))
        return load_tokenizer(info["base_model"], info["revision"])
    try:
        return read_tokenizer(location, revision)
    except MedusaKitError:
        raise
    except Exception as error:  # as for models
        if (missing := not_found(location, error)) is not None:
            raise missing from error
        raise CheckpointError(
            f"cannot load a tokenizer from {location!r}: {error}", hint=AGAIN
        ) from error
