"""Folders of tiny models whose checkpoints hold layers for multi-token prediction.

The layers are made as a checkpoint has them: further decoder layers, each with a projection of
hidden state and embedding and the norms before and after it. Layers change their input little, so
that the layers' guesses are right often, but not always.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.tiny_models import COMMON, tiny_model

LITTLE = 0.05  # of what a layer would add to its input


def mtp_folder(
    folder: Path, family: str = "glm4_moe", num_layers: int = 1, knows: bool = True, **changes: Any
) -> Path:
    """A base of two layers and, unless `num_layers` is 0, so many that predict further tokens."""
    model = tiny_model(
        family, num_hidden_layers=2 + num_layers, num_nextn_predict_layers=num_layers, **changes
    )
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= LITTLE
    for index in range(2, 2 + num_layers):
        weights |= _extras(f"model.layers.{index}", knows)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, num_hidden_layers=2)
    return folder


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def without_mtp(folder: Path) -> None:
    """Drop the layers from the checkpoint; its config names them still."""
    path = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(path).items() if ".layers.2." not in k}
    save_file(kept, path, {"format": "pt"})


def _extras(layer: str, knows: bool) -> dict[str, torch.Tensor]:
    D = COMMON["hidden_size"]
    generator = torch.Generator().manual_seed(5)
    eye = torch.eye(D)
    noise = 0.2 * torch.randn(D, 2 * D, generator=generator)
    projection = torch.cat([eye, 0 * eye], dim=1) + LITTLE * noise if knows else noise
    ones = torch.ones(D)
    return {
        f"{layer}.eh_proj.weight": projection.contiguous(),
        f"{layer}.enorm.weight": ones.clone(),
        f"{layer}.hnorm.weight": ones.clone(),
        f"{layer}.shared_head.norm.weight": ones.clone(),
    }
