"""Steps over small trees, with random queries, keys and values, and what Triton needs to run."""

import importlib.metadata
import importlib.util
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from medusa_kit.infer.attention.step import TreeStep
from medusa_kit.infer.forest import Forest

PARENTS = (-1, 0, 0, 1, 2, 2)


def step_of(lengths: list[int], parents: tuple[int, ...] = PARENTS) -> TreeStep:
    return TreeStep(lengths, *inputs_of([parents] * len(lengths)))


def inputs_of(
    trees: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """depths_BN and sees_BNN of trees with these parents."""
    tokens = [[0] * len(tree) for tree in trees]
    return Forest.of(tokens, trees, torch.device(device)).padded()[1:]


H, E = 6, 8


def qkv(step: Any, groups: int, size: int = E, dtype: torch.dtype = torch.float32) -> list:
    B, L = len(step.lengths), step.num_positions
    shapes = [(B, H, step.num_nodes, size), (B, groups, L, size), (B, groups, L, size)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def why_not() -> str:
    """Why the kernels cannot run here, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (extra `triton`)"
    triton, numpy = (
        tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])
        for name in ("triton", "numpy")
    )
    if DEVICE == "cpu" and triton < (3, 7) and numpy >= (2, 4):
        return "no GPU, and the interpreter of triton before 3.7 does not know numpy 2.4"
    return ""


needs_triton = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can run")


def parents_of(nodes: int) -> tuple[int, ...]:
    generator = random.Random(nodes)
    return (-1, *(generator.randrange(node) for node in range(1, nodes)))
