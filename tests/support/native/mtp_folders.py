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
from transformers import AutoConfig, AutoModelForCausalLM

from support.models.hybrids import DELTA
from support.tiny_models import COMMON, STOP, tiny_model

LITTLE = 0.05  # of what a layer would add to its input
ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


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
        if name.endswith(ADDING):
            weights[name] *= LITTLE
    for index in range(2, 2 + num_layers):
        weights |= _extras(f"model.layers.{index}", knows)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, num_hidden_layers=2)
    return folder


def qwen_folder(folder: Path) -> Path:
    """The same as Qwen3.5's checkpoints hold it, in names of its own. Its first layer carries a
    state, so that its draft tokens are verified as chains."""
    kinds = ["linear_attention", "full_attention"]
    config = AutoConfig.for_model(
        "qwen3_5_text",
        **{**COMMON, **DELTA, "head_dim": 16, "layer_types": [*kinds, kinds[1]],
           "eos_token_id": STOP,
           "mtp_num_hidden_layers": 1, "tie_word_embeddings": False},
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights = {k.replace("model.layers.2.", "mtp.layers.0."): v for k, v in weights.items()}
    weights = {k: LITTLE * v if k.endswith(ADDING) else v for k, v in weights.items()}
    weights["mtp.fc.weight"] = _projection(True)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        weights[f"mtp.{norm}.weight"] = torch.zeros(COMMON["hidden_size"])  # one is added to it
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, num_hidden_layers=2, layer_types=kinds)
    return folder


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def without_tensors(folder: Path, part: str) -> None:
    """Drop those that have this in their names from the checkpoint; its config stays."""
    path = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(path).items() if part not in k}
    save_file(kept, path, {"format": "pt"})


def _extras(layer: str, knows: bool) -> dict[str, torch.Tensor]:
    norms = ("enorm", "hnorm", "shared_head.norm")
    ones = {f"{layer}.{norm}.weight": torch.ones(COMMON["hidden_size"]) for norm in norms}
    return {f"{layer}.eh_proj.weight": _projection(knows), **ones}


def _projection(knows: bool) -> torch.Tensor:
    """Of embedding and hidden state: the embedding, nearly, where the layer `knows`."""
    D = COMMON["hidden_size"]
    noise = 0.2 * torch.randn(D, 2 * D, generator=torch.Generator().manual_seed(5))
    return torch.eye(D, 2 * D) + LITTLE * noise if knows else noise
