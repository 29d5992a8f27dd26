"""Tree attention by our own Triton kernels: how their arguments are prepared and they are launched.

One pass over prefix and tree with split keys, a bit for each ancestor, a length for each row,
windows by position, soft caps and sinks, in float32 too. Triton is imported when first used.

Shapes: B batch, H query heads, G key/value heads, N nodes with root, L slots in sight, E and EV
head dim of keys and values, W words of ancestors, S splits, X rows of all groups.
"""

import importlib.util
import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from medusa_kit.infer.attention.backend import (
    CHUNKS,
    AttentionCall,
    BackendFailure,
    Case,
    compute_capability,
)
from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.infer.attention.step import TreeStep

MAX_HEAD_SIZE = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WORD = 64
PROGRAMS_PER_CORE = 2  # enough to keep a streaming multiprocessor busy
MAX_REGISTERS = 255  # per thread; PROGRAMS_PER_CORE programs of 4 warps can have as many
SLOTS_PER_SPLIT = 64  # at least, in a full cache: one tile of keys
MIN_SLOTS = 16  # per split of a short row: the least that a tensor core's products take
FINE_SPLITS = 6  # of short rows, for the self-check: more than are merged at once
SPLITS_AT_ONCE = 4  # in the merge: as many loads in flight, and few registers


def missing() -> tuple[str, str] | None:
    """(what is missing, the extra that provides it), or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed", "triton"
    return None


def unsupported(case: Case) -> str | None:
    """Why the kernels cannot compute this case, or None."""
    if case.chunks:
        return CHUNKS
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
    if case.device == "cuda" and compute_capability(case.index) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def interpreting() -> bool:
    """Whether Triton interprets its kernels, as tests do where there is no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def ancestor_words(sees_BNN: Tensor) -> Tensor:
    """words_BNW, int64: bit j % 64 of word j // 64 says whether a node sees node j."""
    B, N, _ = sees_BNN.shape
    W = -(-N // WORD)
    bits_BNWJ = functional.pad(sees_BNN, (0, W * WORD - N)).view(B, N, W, WORD)
    shifts_J = torch.arange(WORD, device=sees_BNN.device)
    return (bits_BNWJ.long() << shifts_J).sum(-1)


def tree_triton(call: AttentionCall, num_splits: int | None = None) -> Tensor:
    """Attention output [B, N, H, E]; equal to `tree_sdpa` up to rounding.

    `num_splits`: over how many programs the slots of a row are spread; chosen for the machine
    unless given. Raises BackendFailure where Triton cannot compile a kernel or launch it.
    """
    return tree_sdpa(call) if call.is_causal else launched(launch, call, num_splits)


def launched(
    run: Callable[..., None], call: AttentionCall, num_splits: int | None = None
) -> Tensor:
    """The output, after `run` has launched each kernel with its grid and arguments.

    benchmarks/gpu_check/kernels.py, which needs no device, compiles the kernels instead.
    """
    from medusa_kit.infer.attention.triton_kernel import merge_kernel, split_kernel

    query_BHNE, key_BGLE, value_BGLE = call.query_BHNE, call.key_BGLE, call.value_BGLE
    step, sinks_H = call.step, call.sinks_H
    B, H, N, E = query_BHNE.shape
    G, EV = key_BGLE.shape[1], value_BGLE.shape[-1]
    R, device = H // G * N, query_BHNE.device
    words, depths, lengths = step.once("triton", lambda: _described(step))
    tile = configuration(R, E, EV, query_BHNE.element_size())
    tiles = -(-R // tile["BLOCK_R"])
    S = num_splits or _splits(tiles * B * G, step, device)
    partials_SXV = torch.empty(S, B * G * R, EV, dtype=torch.float32, device=device)
    lses_SX = torch.empty(S, B * G * R, dtype=torch.float32, device=device)
    run(
        split_kernel, (tiles, B * G, S),
        query_BHNE, key_BGLE, value_BGLE, words, depths, lengths, partials_SXV, lses_SX,
        *query_BHNE.stride(), *key_BGLE.stride(), *value_BGLE.stride(),
        call.scale, call.softcap or 0.0, call.slides or 0, G, N, R, words.shape[-1],
        1 if step.split_finely else MIN_SLOTS,
        E=E, EV=EV, HAS_WINDOW=step.window_applies(call.window), HAS_CAP=call.softcap is not None,
        **tile,
    )  # fmt: skip
    out_BNHV = query_BHNE.new_empty(B, N, H, EV)
    run(
        merge_kernel, (B * H * N,),
        partials_SXV, lses_SX, lses_SX if sinks_H is None else sinks_H.float().contiguous(),
        out_BNHV, S, N, H,
        EV=EV, HAS_SINKS=sinks_H is not None, BLOCK_S=SPLITS_AT_ONCE, BLOCK_V=tile["BLOCK_V"],
        num_warps=1,
    )  # fmt: skip
    return out_BNHV


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel. At the first launch Triton compiles it, finds the driver and builds a small
    library in C. Each of these fails in its own way where the machine lacks something."""
    from triton.errors import TritonError

    device = arguments[0].device  # Triton launches on the current device, which may be another
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    try:
        with torch.cuda.device(device) if elsewhere else nullcontext():
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
    """(words_BNW, depths_BN, lengths_B) as the kernel reads them, the same for all layers."""
    depths_BN = step.depths_BN.to(torch.int32).contiguous()
    lengths_B = step.device_lengths().to(torch.int32)
    return ancestor_words(step.sees_BNN), depths_BN, lengths_B


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def configuration(rows: int, head_size: int, value_size: int, item_size: int) -> dict[str, int]:
    """Tile sizes and warps of the first kernel. `make gpu-check` holds them to their limits.

    Two stages of a tile's keys and values must fit into 99 kB of shared memory on the smaller
    devices (8.6, 8.9, 12.0), and a program's sums must stay in registers. Float32 uses no tensor
    cores here (they would round to 10 bits), and each thread holds whole columns: small tiles.
    """
    block_e, block_v = (max(16, _power_of_two(size)) for size in (head_size, value_size))
    widest = max(block_e, block_v)
    if item_size > 2:
        max_rows, block_l = (32 if widest <= 64 else 16), 16
    elif widest <= 128:
        max_rows, block_l = 64, (64 if rows <= 16 else 32)
    else:
        max_rows, block_l = 32, (32 if rows <= 16 else 16)
    chosen = {
        "BLOCK_R": min(max_rows, max(16, _power_of_two(rows))),
        "BLOCK_L": block_l,
        "BLOCK_E": block_e,
        "BLOCK_V": block_v,
        "num_warps": 4,
        "num_stages": 2,
    }
    # Without it ptxas saves registers for more programs per core than are launched and spills a few
    # bytes. torch.compile does not know the option, and in float32 it makes things worse.
    if item_size <= 2 and not torch.compiler.is_compiling():
        chosen["maxnreg"] = MAX_REGISTERS
    return chosen


def _splits(programs: int, step: TreeStep, device: torch.device) -> int:
    """The number of programs that the slots of a row are spread over. Each takes its share of the
    slots in use, so a number for the whole cache, as in a captured step, suits any length."""
    if step.split_finely:
        return FINE_SPLITS
    splits = -(-PROGRAMS_PER_CORE * _num_cores(device) // programs)
    return max(1, min(splits, step.num_positions // SLOTS_PER_SPLIT))


def _num_cores(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
