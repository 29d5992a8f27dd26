"""Checkpoint folders of other engines, built from what those engines document, with plain code.

Nothing of medusa-kit's own writers is used here: names, shapes and configs are stated once more.

Shapes: D hidden, V vocabulary, K heads, L blocks of a head, B batch.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

D, V = 32, 96


@dataclass
class Parts:
    """weights[i][j], biases[i][j], matrices[i]: what the heads are, whatever the format."""

    weights: list[list[Tensor]]
    biases: list[list[Tensor]]
    matrices: list[Tensor]

    @property
    def K(self) -> int:
        return len(self.weights)

    @property
    def L(self) -> int:
        return len(self.weights[0])

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """logits_KBV, by the paper's formula."""
        result = []
        for weights, biases, matrix in zip(self.weights, self.biases, self.matrices, strict=True):
            x_BD = hidden_BD
            for weight, bias in zip(weights, biases, strict=True):
                x_BD = x_BD + F.silu(F.linear(x_BD, weight, bias))
            result.append(F.linear(x_BD, matrix))
        return torch.stack(result)


def random_parts(
    K: int = 3, L: int = 1, dtype: torch.dtype = torch.float32, tied: bool = False, seed: int = 0
) -> Parts:
    """`tied`: all blocks of a head are one tensor, as FasterDecoding's trainers save them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (0.2 * torch.randn(*shape, generator=generator)).to(dtype)

    weights, biases = [], []
    for _ in range(K):
        weights.append([draw(D, D)] * L if tied else [draw(D, D) for _ in range(L)])
        biases.append([draw(D)] * L if tied else [draw(D) for _ in range(L)])
    return Parts(weights, biases, [draw(V, D) for _ in range(K)])


ROUNDING = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}


def agree(ours_KBV: Tensor, theirs_KBV: Tensor) -> None:
    """Logits, to within rounding: in which order a product is summed is the library's to choose,
    by the processor, by the shape, even by where the numbers lie. Weights are compared bit by bit.
    """
    size = theirs_KBV[theirs_KBV.isfinite()].abs().max()
    atol = float(size) * ROUNDING[theirs_KBV.dtype]
    torch.testing.assert_close(ours_KBV, theirs_KBV, atol=atol, rtol=0)


def dotted(parts: Parts, prefix: str = "", matrices: bool = True) -> dict[str, Tensor]:
    tensors = {}
    for i in range(parts.K):
        for j in range(parts.L):
            tensors[f"{prefix}{i}.{j}.linear.weight"] = parts.weights[i][j]
            tensors[f"{prefix}{i}.{j}.linear.bias"] = parts.biases[i][j]
        if matrices:
            tensors[f"{prefix}{i}.{parts.L}.weight"] = parts.matrices[i]
    return tensors


def vllm(parts: Parts, bias: bool = True) -> dict[str, Tensor]:
    tensors = {}
    for i in range(parts.K):
        for j in range(parts.L):
            tensors[f"blocks.{i}.layers.{j}.weight"] = parts.weights[i][j]
            if bias:
                tensors[f"blocks.{i}.layers.{j}.bias"] = parts.biases[i][j]
        tensors[f"lm_heads.{i}.weight"] = parts.matrices[i]
    return tensors


def trt_engine(parts: Parts) -> dict[str, Tensor]:
    tensors = {}
    for i in range(parts.K):
        for j in range(parts.L):
            place = f"medusa_heads.{i}.medusa_layers.{j}.linear"
            tensors[f"{place}.weight"] = parts.weights[i][j]
            tensors[f"{place}.bias"] = parts.biases[i][j]
        tensors[f"medusa_heads.{i}.lm_head.weight"] = parts.matrices[i]
    return tensors


def put(folder: Path, config: dict[str, Any] | None, **files: dict[str, Tensor]) -> Path:
    """config.json and safetensors files, named by keyword (`__` for a dot)."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        copies = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
        save_file(copies, folder / f"{name.replace('__', '.')}.safetensors")
    return folder


def numbers(parts: Parts) -> dict[str, Any]:
    return {"medusa_num_heads": parts.K, "medusa_num_layers": parts.L}


def fd_config(parts: Parts, **more: Any) -> dict[str, Any]:
    return {"base_model_name_or_path": "lmsys/vicuna", **numbers(parts), **more}


def vllm_config(parts: Parts, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": D,
        "num_heads": parts.K, "num_hidden_layers": parts.L, "truncated_vocab_size": None,
        "vocab_size": V, "medusa_fc_bias": True, **more,
    }  # fmt: skip


def base_tensors() -> dict[str, Tensor]:
    return {"model.embed_tokens.weight": torch.ones(V, D), "lm_head.weight": torch.ones(V, D)}


def fd_pickle(folder: Path, parts: Parts) -> Path:
    put(folder, fd_config(parts, transformers_version="4.31.0"))
    torch.save(dotted(parts), folder / "medusa_lm_head.pt")
    return folder


def merged_shards(folder: Path, parts: Parts) -> Path:
    """Base and heads in two pickles with an index, and a config without any count of heads."""
    put(folder, {"architectures": ["LlamaForCausalLM"], "hidden_size": D, "vocab_size": V})
    shards = {
        "pytorch_model-00001-of-00002.bin": base_tensors(),
        "pytorch_model-00002-of-00002.bin": dotted(parts, "medusa_head."),
    }
    index = {name: file for file, tensors in shards.items() for name in tensors}
    for file, tensors in shards.items():
        torch.save(tensors, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def merged_safetensors(folder: Path, parts: Parts) -> Path:
    config = {"architectures": ["MistralForCausalLM"], "num_attention_heads": 4, **numbers(parts)}
    return put(folder, config, model=base_tensors() | dotted(parts, "medusa_head."))


def mlc(folder: Path, parts: Parts) -> Path:
    config = {"model_type": "medusa", "hidden_size": D, "vocab_size": V, **numbers(parts)}
    return put(folder, config, model=dotted(parts, "medusa_head."))


def modelopt(folder: Path, parts: Parts) -> Path:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": D, "medusa": numbers(parts)}
    return put(folder, config, model=base_tensors() | dotted(parts, "medusa_heads."))


def trt_checkpoint(folder: Path, parts: Parts) -> Path:
    config = {"architecture": "MedusaForCausalLM", "num_medusa_heads": parts.K,
              "num_medusa_layers": parts.L, "max_draft_len": 63}  # fmt: skip
    return put(folder, config, rank0={"lm_head.weight": torch.ones(V, D)} | trt_engine(parts))


def beside_shards(folder: Path, parts: Parts) -> Path:
    put(folder, fd_config(parts), medusa_lm_head=dotted(parts), shard=base_tensors())
    index = {"weight_map": dict.fromkeys(base_tensors(), "shard.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


FOLDERS: dict[str, tuple[str, Callable[[Path, Parts], Path]]] = {
    # name of the case: (the format it is recognised as, how it is built)
    "fd-v1 pickle": ("fd-v1", fd_pickle),
    "fd-v1 safetensors": (
        "fd-v1", lambda f, p: put(f, fd_config(p, model_type="llama"), medusa_lm_head=dotted(p))),
    "fd-v1 without config": ("fd-v1", lambda f, p: put(f, None, medusa_lm_head=dotted(p))),
    "tgi": ("fd-v1", lambda f, p: put(f, fd_config(p), medusa_lm_head=dotted(p))),
    "lorax": ("fd-v1", lambda f, p: put(f, fd_config(p, version=1.0), adapter=dotted(p))),
    "fd-v1 beside its base": ("fd-v1", beside_shards),
    "merged .bin": ("fd-merged", merged_shards),
    "merged safetensors": ("fd-merged", merged_safetensors),
    "mlc": ("mlc", mlc),
    "modelopt": ("modelopt", modelopt),
    "vllm": ("vllm", lambda f, p: put(f, vllm_config(p), model=vllm(p))),
    "trt-llm": ("trt-llm", trt_checkpoint),
}  # fmt: skip
