"""Heads to read and write, and what it means that two are the same.

Shapes: D hidden, V vocabulary, K heads, L blocks, B batch, R columns of a projection.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.model import BaseModel
from medusa_kit.heads import MedusaHeads, save_heads
from support.foreign_folders import D, Parts, V, agree
from support.tiny_models import tiny_base

SIZES = [(1, 1), (3, 1), (5, 1), (1, 2), (3, 2), (5, 2)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@cache
def base_in(dtype: torch.dtype) -> BaseModel:
    return tiny_base("llama", dtype=dtype)


def base_matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return base_in(dtype).output_embedding.weight.detach()


def hidden(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, D, generator=torch.Generator().manual_seed(7)).to(dtype)


def logits_of(heads: MedusaHeads, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """logits_KBV over the whole vocabulary, -inf where a head has no opinion."""
    logits_KBR = heads(hidden(dtype))
    if heads.column_ids is None:
        return logits_KBR
    full_KBV = torch.full((*logits_KBR.shape[:2], V), -torch.inf, dtype=dtype)
    full_KBV[..., heads.column_ids] = logits_KBR
    return full_KBV


def hold(heads: MedusaHeads, parts: Parts, dtype: torch.dtype = torch.float32) -> None:
    """The heads are `parts`: every weight bit for bit, logits to within rounding."""
    assert heads.num_heads == parts.K
    for k, blocks in enumerate(heads.blocks):
        expected = list(zip(parts.weights[k], parts.biases[k], strict=True))
        for block, (weight, bias) in zip(blocks, expected, strict=True):
            assert torch.equal(block.linear.weight, weight)
            assert torch.equal(block.linear.bias, bias)
    hold_matrices(heads, parts.matrices)
    agree(logits_of(heads, dtype), parts.logits(hidden(dtype)))


def projection_of(heads: MedusaHeads, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight_RD, bias_R) of head k."""
    if heads.config.projection == "own":
        return heads.projections[k].weight, heads.projections[k].bias
    return heads.base.output_rows(heads.column_ids)


def hold_matrices(heads: MedusaHeads, matrices: list[torch.Tensor]) -> None:
    """Also of heads that have only the rows of some tokens."""
    rows = slice(None) if heads.column_ids is None else heads.column_ids
    for k, matrix in enumerate(matrices):
        weight, bias = projection_of(heads, k)
        assert torch.equal(weight, matrix[rows])
        assert bias is None or not bias.any()


FP32 = torch.float32
SOME = torch.tensor([1, 2, 17, 60, 95])


def our_heads(
    K: int = 3, L: int = 1, projection: str = "own", dtype: torch.dtype = FP32, **kinds: Any
) -> MedusaHeads:
    """Heads with every weight away from its start."""
    ids_R = SOME if projection == "reduced" else None
    heads = MedusaHeads.for_base(base_in(dtype), K, L, projection, ids_R, **kinds)  # type: ignore[arg-type]
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return heads.requires_grad_(False)


def saved(folder: Path, **options: Any) -> tuple[Path, MedusaHeads]:
    heads = our_heads(**options)
    save_heads(heads, folder)
    return folder, heads


def same_weights(ours: MedusaHeads, theirs: MedusaHeads) -> None:
    """Bit for bit."""
    expected = theirs.state_dict()
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
