"""What each engine does with a folder of heads, restated: the names, sizes and keys it asks for.

Every loader returns logits_KBV of a hidden state, by the engine's own way of building heads, and
fails where the engine would: on a missing name, a key it needs, or a value that crashes it.

How the real ones make a head, each read in its source (repository, file, commit). Every linear
layer is stored as [out, in], nothing is transposed; blocks are applied in the order of their
numbers, the vocabulary matrix last; a block is x + SiLU(Wx + b).

engine           blocks of a head     bias            matrix
FasterDecoding   ONE, repeated: the   needed          each head's, or the base's
                 last read wins                       (version "2")
TGI              each its own         needed          each head's, or the base's (L = 1)
LoRAX            each its own         needed          each head's, or the base's (L = 1)
vLLM             each its own         medusa_fc_bias  each head's, or one (original_lm_head)
TensorRT-LLM     each its own         needed          each head's
MLC-LLM          each its own         needed          each head's
Model Optimizer  each its own         needed          each head's

FasterDecoding/Medusa@e2a5d20        medusa/model/medusa_model.py, medusa_model_legacy.py
huggingface/text-generation-inference@91560ed  layers/medusa.py
predibase/lorax@0ee3250              adapters/medusa.py
vllm-project/vllm@01dbb08            model_executor/models/medusa.py
NVIDIA/TensorRT-LLM@27712aa          tensorrt_llm/models/medusa/weight.py
mlc-ai/mlc-llm@01ced33               python/mlc_llm/model/medusa/medusa_model.py
NVIDIA/Model-Optimizer@a2fbac7       modelopt/torch/speculative/plugins/hf_medusa.py

FasterDecoding loads with strict=False: what it has no place for is dropped. Version v0.1 makes as
many heads as the config says, the main branch five.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
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


def trt_llm(folder: Path, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    """The converter, which copies each tensor by its name."""
    config, weights = read(folder, "medusa_lm_head.safetensors")
    assert config["base_model_name_or_path"]
    K, L = config["medusa_num_heads"], config["medusa_num_layers"]
    assert len(weights) == K * (2 * L + 1)
    return _version_1(weights, K, L, hidden_BD)


class RepeatedBlock(nn.Module):
    """FasterDecoding's block, of which a head has one, however many layers its config says."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + F.silu(self.linear(x_BD))


def _fasterdecoding(weights: dict[str, Tensor], K: int, L: int, hidden_BD: Tensor) -> Any:
    """Its heads without and with a matrix, by torch's own way of loading a state."""
    D, dtype = hidden_BD.shape[1], hidden_BD.dtype
    with_matrix = f"0.{L}.weight" in weights
    heads = nn.ModuleList()
    for i in range(K):
        layers: list[nn.Module] = [RepeatedBlock(D)] * L
        if with_matrix:
            layers.append(nn.Linear(D, len(weights[f"{i}.{L}.weight"]), bias=False))
        heads.append(nn.Sequential(*layers))
    heads.to(dtype)
    missing, unexpected = heads.load_state_dict(weights, strict=False)
    assert not missing
    assert not unexpected
    with torch.no_grad():
        return [head(hidden_BD) for head in heads]


def fd_v1(folder: Path, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    config, weights = read(folder, "medusa_lm_head.safetensors")
    assert config["base_model_name_or_path"]
    K, L = config["medusa_num_heads"], config["medusa_num_layers"]
    return torch.stack(_fasterdecoding(weights, K, L, hidden_BD))


def fd_v2(folder: Path, hidden_BD: Tensor, base_VD: Tensor) -> Tensor:
    config, weights = read(folder, "medusa_lm_head.safetensors")
    assert config["version"] == "2"
    K, L = config["medusa_num_heads"], config["medusa_num_layers"]
    hidden = _fasterdecoding(weights, K, L, hidden_BD)
    return torch.stack([F.linear(x_BD, base_VD) for x_BD in hidden])


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
    "vllm": vllm, "tgi": tgi, "lorax": lorax, "fd-v1": fd_v1, "fd-v2": fd_v2, "trt-llm": trt_llm,
    "mlc": mlc, "modelopt": modelopt,
}  # fmt: skip
REPEATS_A_BLOCK = ("fd-v1", "fd-v2")
