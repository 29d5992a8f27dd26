"""Tree attention by our own Triton kernels: what they need made ready, and how they are launched.

One pass over prefix and tree with split keys, a bit for each ancestor, a length for each row,
windows by position, soft caps and sinks; float32 as well. Triton is imported when first used.

Shapes: B batch, H query heads, G key/value heads, N nodes with root, L slots in sight, E and EV
head dim of keys and values, W words of ancestors, S splits, X rows of all groups.
"""

import functools
import importlib.util
import os
import subprocess
from typing import Any

import torch
from torch import Tensor

from medusa_kit.infer.attention.backend import BackendFailure, Case, compute_capability
from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.infer.tree_step import TreeStep

MAX_HEAD_SIZE = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WORD = 64
PROGRAMS_PER_CORE = 2  # enough to keep a streaming multiprocessor busy
BLOCKS_PER_SPLIT = 4  # fewer and the merge costs more than the split gains


def missing() -> tuple[str, str] | None:
    """(what is missing, the extra that brings it), or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed", "triton"
    return None


def unsupported(case: Case) -> str | None:
    """Why the kernels cannot do this case, or None."""
    if absent := missing():
        return absent[0]
    if case.device == "cpu" and not interpreting():
        return "Triton kernels need a GPU"
    if case.device not in ("cpu", "cuda"):
        return f"no kernel for {case.device}"
    if case.dtype not in DTYPES:
        return f"{str(case.dtype).removeprefix('torch.')} (float32, float16 and bfloat16 only)"
    if max(case.head_size, case.value_size) > MAX_HEAD_SIZE:
        return f"head size {max(case.head_size, case.value_size)} ({MAX_HEAD_SIZE} at most)"
    if case.device == "cuda" and compute_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def interpreting() -> bool:
    """Whether Triton interprets its kernels, which works without a GPU and is for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def ancestor_words(sees_BNN: Tensor) -> Tensor:
    """Bit j % 64 of word j // 64 says whether a node sees node j: words_BNW, int64."""
    B, N, _ = sees_BNN.shape
    W = -(-N // WORD)
    bits_BNWJ = sees_BNN.new_zeros(B, N, W * WORD)
    bits_BNWJ[..., :N] = sees_BNN
    shifts_J = torch.arange(WORD, device=sees_BNN.device)
    return (bits_BNWJ.view(B, N, W, WORD).long() << shifts_J).sum(-1)


def tree_triton(
    query_BHNE: Tensor,
    key_BGLE: Tensor,
    value_BGLE: Tensor,
    step: TreeStep,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Attention output [B, N, H, E]; equal to `tree_sdpa` but for rounding.

    `num_splits`: over how many programs the slots of a row are spread; by the machine unless given.
    Raises BackendFailure where Triton cannot compile a kernel or launch it.
    """
    if step.is_causal(window) and softcap is None and sinks_H is None:
        return tree_sdpa(query_BHNE, key_BGLE, value_BGLE, step, scale, window)
    from medusa_kit.infer.attention.triton_kernel import merge_kernel, split_kernel

    B, H, N, E = query_BHNE.shape
    G, EV = key_BGLE.shape[1], value_BGLE.shape[-1]
    R, device = H // G * N, query_BHNE.device
    words, depths, lengths = step.once("triton", lambda: _described(step))
    blocks = _blocks(R, E, EV, query_BHNE.element_size())
    tiles = -(-R // blocks["BLOCK_R"])
    S, chunk = _splits(num_splits, tiles * B * G, step.num_slots, blocks["BLOCK_L"], device)
    partials_SXV = torch.empty(S, B * G * R, EV, dtype=torch.float32, device=device)
    lses_SX = torch.empty(S, B * G * R, dtype=torch.float32, device=device)
    bites = window is not None and step.window_bites(window)
    _run(
        split_kernel, (tiles, B * G, S),
        query_BHNE, key_BGLE, value_BGLE, words, depths, lengths, partials_SXV, lses_SX,
        *query_BHNE.stride(), *key_BGLE.stride(), *value_BGLE.stride(),
        scale, softcap or 0.0, window or 0, G, N, R, chunk,
        E=E, EV=EV, W=words.shape[-1], HAS_WINDOW=bites, HAS_CAP=softcap is not None,
        **blocks, num_warps=4, num_stages=2,
    )  # fmt: skip
    out_BNHV = query_BHNE.new_empty(B, N, H, EV)
    _run(
        merge_kernel, (B * H * N,),
        partials_SXV, lses_SX, lses_SX if sinks_H is None else sinks_H.float().contiguous(),
        out_BNHV, S, N, H,
        EV=EV, HAS_SINKS=sinks_H is not None, BLOCK_S=_power_of_two(S), BLOCK_V=blocks["BLOCK_V"],
        num_warps=1,
    )  # fmt: skip
    return out_BNHV


def _run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel. At the first launch Triton compiles it, finds the driver and builds a small
    library in C, and each of these fails in a way of its own where the machine lacks something."""
    from triton.errors import TritonError

    try:
        kernel[grid](*arguments, **options)
    except subprocess.CalledProcessError as error:
        raise BackendFailure(
            f"a compiler that Triton needs failed with exit status {error.returncode}; its "
            "launcher takes a C compiler and Python's headers, Python.h (package python3-dev)"
        ) from error
    except (TritonError, OSError, ImportError, AssertionError, RuntimeError) as error:
        lines = str(error).splitlines() or ["no reason given"]
        raise BackendFailure(f"Triton failed with {type(error).__name__}: {lines[0]}") from error


def _described(step: TreeStep) -> tuple[Tensor, Tensor, Tensor]:
    """(words_BNW, depths_BN, lengths_B) as the kernel reads them, made once for all layers."""
    depths_BN = step.depths_BN.to(torch.int32).contiguous()
    lengths_B = step.device_lengths().to(torch.int32)
    return ancestor_words(step.sees_BNN), depths_BN, lengths_B


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _blocks(rows: int, head_size: int, value_size: int, item_size: int) -> dict[str, int]:
    """Tile sizes, smaller for wide heads: query, keys and values of a tile share fast memory."""
    block_e, block_v = (max(16, _power_of_two(size)) for size in (head_size, value_size))
    wide = max(block_e, block_v) * item_size > 256
    most_rows = 32 if wide else 64
    return {
        "BLOCK_R": min(most_rows, max(16, _power_of_two(rows))),
        "BLOCK_L": 32 if wide else 64,
        "BLOCK_E": block_e,
        "BLOCK_V": block_v,
    }


def _splits(
    asked: int | None, programs: int, num_slots: int, block: int, device: torch.device
) -> tuple[int, int]:
    """(number of splits, slots in each, a multiple of the block)."""
    if asked is None:
        wanted = -(-PROGRAMS_PER_CORE * _num_cores(device) // programs)
        asked = max(1, min(wanted, num_slots // (BLOCKS_PER_SPLIT * block)))
    chunk = -(-num_slots // (asked * block)) * block
    return -(-num_slots // chunk), chunk


@functools.cache
def _num_cores(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
