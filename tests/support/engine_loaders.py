"""What each engine does with a folder of heads, restated: the names, sizes and keys it asks for.

Every loader returns logits_KBV of a hidden state, by the engine's own way of building heads, and
fails where the engine would: on a missing name, a key it needs, or a value that crashes it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F


def read(folder: Path, file: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / file)


def head(hidden_BD: Tensor, blocks: list[tuple[Tensor, Tensor | None]], matrix: Tensor) -> Tensor:
    D = hidden_BD.shape[1]
    for weight, bias in blocks:
        assert weight.shape == (D, D)
        assert bias is None or bias.shape == (D,)
        hidden_BD = hidden_BD + F.silu(F.linear(hidden_BD, weight, bias))
    return F.linear(hidden_BD, matrix)


def vllm(folder: Path, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    config, weights = read(folder, "model.safetensors")
    assert config["architectures"] == ["MedusaModel"]
    assert config["model_type"] == "medusa"
    seen = {"hidden_size": 4096, "vocab_size": 32001, "num_heads": 5, "num_hidden_layers": 1}
    for key, value in config.items():  # from_pretrained's renaming, by parts of the key
        if "num" in key and "heads" in key:
            key = "num_heads"
        elif "num" in key and "layers" in key:
            key = "num_hidden_layers"
        seen[key] = value
    V, D = base_VD.shape
    assert (seen["vocab_size"], seen["hidden_size"]) == (V, D)
    K, L, R = seen["num_heads"], seen["num_hidden_layers"], seen["truncated_vocab_size"] or V
    wanted = {}
    for i in range(K):
        for j in range(L):
            wanted[f"blocks.{i}.layers.{j}.weight"] = (D, D)
            if seen.get("medusa_fc_bias", False):
                wanted[f"blocks.{i}.layers.{j}.bias"] = (D,)
        if not seen.get("original_lm_head", False):
            wanted[f"lm_heads.{i}.weight"] = (V, D)  # whatever the map: 0.32 asserts it
    if seen.get("original_lm_head", False):
        wanted["lm_head.weight"] = (R, D)
    token_map = weights.pop("token_map", None) if R < V else None
    assert (R == V) or token_map is not None
    dropped = set(weights) - set(wanted)
    assert not dropped, f"vLLM would drop {dropped} without a word"
    assert {name: tuple(weights[name].shape) for name in wanted} == wanted
    result = []
    for i in range(K):
        blocks = [(weights[f"blocks.{i}.layers.{j}.weight"],
                   weights.get(f"blocks.{i}.layers.{j}.bias")) for j in range(L)]  # fmt: skip
        matrix = weights.get(f"lm_heads.{i}.weight", weights.get("lm_head.weight"))
        logits = head(hidden_BD, blocks, matrix)
        if token_map is not None:
            full = torch.full((len(hidden_BD), V), -torch.inf, dtype=logits.dtype)
            full[:, token_map] = logits
            logits = full
        result.append(logits)
    return torch.stack(result)


def _version_1(weights: dict[str, Tensor], K: int, L: int, hidden_BD: Tensor) -> Tensor:
    return torch.stack([
        head(
            hidden_BD,
            [(weights[f"{i}.{j}.linear.weight"], weights[f"{i}.{j}.linear.bias"])
             for j in range(L)],
            weights[f"{i}.{L}.weight"],
        )
        for i in range(K)
    ])  # fmt: skip


def _version_2(weights: dict[str, Tensor], K: int, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    return torch.stack([
        head(hidden_BD, [(weights[f"{i}.0.linear.weight"], weights[f"{i}.0.linear.bias"])], base_VD)
        for i in range(K)
    ])  # fmt: skip


def tgi(folder: Path, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    config, weights = read(folder, "medusa_lm_head.safetensors")
    assert "architectures" not in config, "TGI builds neither speculator nor LM head"
    assert config["base_model_name_or_path"]
    K, L = config["medusa_num_heads"], config["medusa_num_layers"]
    try:
        return _version_1(weights, K, L, hidden_BD)
    except KeyError:
        assert L == 1
        return _version_2(weights, K, hidden_BD, base_VD)


def lorax(folder: Path, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    weights = {}
    for path in folder.glob("*.safetensors"):
        if not any(word in path.name for word in ("arguments", "args", "training")):
            weights |= load_file(path)
    assert config["base_model_name_or_path"]
    K, L = config["medusa_num_heads"], config["medusa_num_layers"]
    version_1 = L > 1 or f"0.{L}.weight" in weights
    assert float(config.get("version", 1)) == (1.0 if version_1 else 2.0)
    if version_1:
        return _version_1(weights, K, L, hidden_BD)
    return _version_2(weights, K, hidden_BD, base_VD)


def fd_v1(folder: Path, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    """TensorRT-LLM's converter asks for the same."""
    config, weights = read(folder, "medusa_lm_head.safetensors")
    assert config["base_model_name_or_path"]
    K, L = config["medusa_num_heads"], config["medusa_num_layers"]
    assert len(weights) == K * (2 * L + 1)
    return _version_1(weights, K, L, hidden_BD)


def fd_v2(folder: Path, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    config, weights = read(folder, "medusa_lm_head.safetensors")
    assert config["version"] == "2"
    K, L = config["medusa_num_heads"], config["medusa_num_layers"]
    with_base = {**weights, **{f"{i}.{L}.weight": base_VD for i in range(K)}}
    assert len(with_base) == len(weights) + K
    return _version_1(with_base, K, L, hidden_BD)


def mlc(folder: Path, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    config, weights = read(folder, "model.safetensors")
    assert config["model_type"] == "medusa"
    assert (config["vocab_size"], config["hidden_size"]) == base_VD.shape
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == dict.fromkeys(weights, "model.safetensors")
    cut = {name.removeprefix("medusa_head."): tensor for name, tensor in weights.items()}
    assert all(name.startswith("medusa_head.") for name in weights)
    return _version_1(cut, config["medusa_num_heads"], config["medusa_num_layers"], hidden_BD)


def modelopt(folder: Path, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    config, weights = read(folder, "model.safetensors")
    said = config["medusa"]
    cut = {name.removeprefix("medusa_heads."): tensor for name, tensor in weights.items()}
    assert all(name.startswith("medusa_heads.") for name in weights)
    return _version_1(cut, said["medusa_num_heads"], said["medusa_num_layers"], hidden_BD)


LOADERS = {
    "vllm": vllm, "tgi": tgi, "lorax": lorax, "fd-v1": fd_v1, "fd-v2": fd_v2, "trt-llm": fd_v1,
    "mlc": mlc, "modelopt": modelopt,
}  # fmt: skip
