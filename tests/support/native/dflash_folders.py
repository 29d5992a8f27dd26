"""Folders of tiny DFlash drafts with random weights, in transformers' form and in that of DFlash's
authors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from support.tiny_models import COMMON

BLOCK = 5
SIZES = {
    "hidden_size": COMMON["hidden_size"],
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": COMMON["max_position_embeddings"],
    "initializer_range": 0.3,
}


def dflash_folder(folder: Path, layers: tuple[int, ...] = (1, 0), **changes: Any) -> Path:
    """A draft for a base of three layers; its own see a window of the text, unless changed."""
    kinds = ["sliding_attention", "full_attention"]
    options = {
        **SIZES,
        "layer_types": kinds,
        "sliding_window": 24,
        "block_size": BLOCK,
        "mask_token_id": 3,
        "target_layer_ids": list(layers),
        **changes,
    }
    torch.manual_seed(2)
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**options))
    model.save_pretrained(folder)
    return folder


def authors_folder(folder: Path) -> Path:
    """The same draft without windows, as `DFlashDraftModel` stores it: config and names of tensors
    are those of z-lab's checkpoints."""
    dflash_folder(folder, layer_types=["full_attention"] * 2)
    config = json.loads((folder / "config.json").read_text())
    kept = {key: config[key] for key in (*SIZES, "block_size") if key in config}
    own = {"mask_token_id": 3, "target_layer_ids": [1, 0]}
    there = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": own,
             "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "vocab_size": 96,
             "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "num_target_layers": 3}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**kept, **there}))
    weights = load_file(folder / "model.safetensors")
    names = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}
    for theirs, other in names.items():
        weights[f"{other}.weight"] = weights.pop(f"{theirs}.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
