"""LoRA adapters with heads of their own, as Medusa-2 writes them, for tiny models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medusa_kit.base import adapters
from medusa_kit.base.model import wrap_model
from medusa_kit.heads import save_heads
from medusa_kit.settings.recipe import LoraSection
from support.small_engines import random_heads


def put_adapter(folder: Path, made: Callable[[], Any], name: str, seed: int, heads: int) -> None:
    """`made` gives a new model each time. The adapter's weights are large enough to change
    answers."""
    base = wrap_model(made(), None, name)
    adapters.put_on(base.model, LoraSection(rank=2, alpha=4, dropout=0.0))
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in base.model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    plain = wrap_model(made(), None, name)
    folder.mkdir(parents=True)
    about: Any = {
        "base_model": name, "revision": None, "base_fingerprint": plain.info.fingerprint,
    }  # fmt: skip
    adapters.save_adapter(base.model, folder, about)
    view = plain.view()
    own = str(plain.adapted_fingerprint(adapters.variant_of(folder)))
    view.info = replace(plain.info, fingerprint=own)
    save_heads(random_heads(view, heads), folder / "medusa_heads")
