"""The Triton kernels against SDPA: on a GPU where there is one, else interpreted."""

import importlib.metadata
import importlib.util
import random

import pytest
import torch
from test_attention import step_of

from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.infer.attention.triton_backend import ancestor_words, tree_triton
from medusa_kit.infer.fixed.forward import FixedTreeStep

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


def test_ancestor_words_hold_every_pair() -> None:
    sees_BNN = step_of([3, 1], parents_of(130)).sees_BNN
    words_BNW = ancestor_words(sees_BNN)
    assert words_BNW.shape == (2, 130, 3)
    for node, other in [(0, 0), (129, 0), (63, 63), (64, 63), (129, 64), (129, 127), (128, 129)]:
        bit = int(words_BNW[0, node, other // 64]) >> other % 64 & 1
        assert bool(bit) is bool(sees_BNN[0, node, other]), (node, other)


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "nodes", "heads", "groups", "window", "extra", "splits"),
    [
        ([9, 0], 6, 2, 1, None, "", 1),
        ([150, 3], 6, 2, 1, None, "softcap", 3),  # splits that hold no slot of a row
        ([70, 64], 6, 2, 2, 9, "", 2),
        ([70, 5], 6, 3, 1, 2, "sinks", 2),  # a window smaller than the tree is deep
        ([5], 66, 1, 1, None, "", 2),  # two words of ancestors, two tiles of rows
    ],
)
def test_equals_sdpa(
    lengths: list[int], nodes: int, heads: int, groups: int, window: int | None, extra: str,
    splits: int,
) -> None:  # fmt: skip
    step = step_of(lengths, parents_of(nodes))
    B, L, size, value_size = len(lengths), step.num_slots, 12, 20
    query = torch.randn(B, nodes, heads, size, device=DEVICE).transpose(1, 2)
    key = torch.randn(B, groups, L + 7, size, device=DEVICE)[:, :, :L]
    value = torch.randn(B, groups, L + 7, value_size, device=DEVICE)[:, :, :L]
    step.depths_BN, step.sees_BNN = step.depths_BN.to(DEVICE), step.sees_BNN.to(DEVICE)
    softcap = 2.0 if extra == "softcap" else None
    sinks = torch.randn(heads, device=DEVICE) if extra == "sinks" else None
    arguments = (query, key, value, step, 0.3, window, softcap, sinks)
    out = tree_triton(*arguments, num_splits=splits)
    torch.testing.assert_close(out, tree_sdpa(*arguments), atol=5e-6, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("window", [None, 9])
def test_lengths_are_read_on_the_device(window: int | None) -> None:
    """A step of fixed shapes knows no length on the host; all slots are in sight."""
    tree = step_of([70, 0], parents_of(6))
    lengths = torch.tensor([70, 0], device=DEVICE)
    depths, sees = tree.depths_BN.to(DEVICE), tree.sees_BNN.to(DEVICE)
    step = FixedTreeStep(lengths, depths, sees, 128, None)
    query = torch.randn(2, 6, 2, 12, device=DEVICE).transpose(1, 2)
    key, value = torch.randn(2, 2, 1, 128, 12, device=DEVICE)
    arguments = (query, key, value, step, 0.3, window)
    out = tree_triton(*arguments, num_splits=2)
    torch.testing.assert_close(out, tree_sdpa(*arguments), atol=5e-6, rtol=1e-5)
