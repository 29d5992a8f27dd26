"""Where memory is too small, a request fails with sizes and the engine goes on.

Shapes: B batch, N nodes with root, S cache slots.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import DeviceMemoryError

GB = 1e9
DEVICE_SAYS = "CUDA error"  # in older torch, whose error is a plain RuntimeError


def is_device_lost(error: BaseException) -> bool:
    """Whether the accelerator can do no more in this process: after some errors, a bad address or
    an assertion in a kernel, every later call fails too."""
    if is_out_of_memory(error) or not torch.accelerator.is_available():
        return False
    kind = getattr(torch, "AcceleratorError", ())
    return (isinstance(error, kind) or DEVICE_SAYS in str(error)) and not _answers()


def _answers() -> bool:
    """Whether the accelerator still works."""
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        return False
    return True


@contextmanager
def explain_oom(
    base: BaseModel, batch_size: int, num_nodes: int, num_positions: int
) -> Iterator[None]:
    """Turn an out-of-memory error into DeviceMemoryError, with sizes and what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # The traceback's frames hold tensors. Without it their memory is free again.
        error.__traceback__ = None
        raise device_memory_error(base, batch_size, num_nodes, num_positions, error) from None


def device_memory_error(
    base: BaseModel, B: int, N: int, S: int, error: BaseException
) -> DeviceMemoryError:
    """An out-of-memory error with sizes and what to do."""
    message = (str(error) or type(error).__name__).splitlines()[0]
    cache, logits = B * S * cache_bytes_per_token(base), B * N * base.info.vocab_size * _size(base)
    smaller = "decode fewer prompts together (batch_size), or ask for fewer tokens"
    if N > 1:
        smaller = f"use a tree of at most {max(1, N // 2)} nodes, or {smaller}"
    return DeviceMemoryError(
        f"{base.info.device} has no room for {B} sequences of up to {S} tokens with {N} nodes "
        f"each: the cache takes about {cache / GB:.2f} GB, a step's logits {logits / GB:.2f} GB"
        f"{_free(base)} ({message})",
        hint=smaller,
    )


def cache_bytes_per_token(base: BaseModel, num_layers: int | None = None) -> int:
    """Keys and values of so many layers, by default all of the base's; estimated from the
    config."""
    config: Any = base.config
    heads = getattr(config, "num_attention_heads", None)
    if not heads:  # Mamba, say
        return 0
    layers = base.info.num_layers if num_layers is None else num_layers
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or base.info.hidden_size // heads
    return 2 * layers * groups * head_size * _size(base)


def _size(base: BaseModel) -> int:
    return base.dtype.itemsize


def _free(base: BaseModel) -> str:
    if base.device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(base.device)
    return f", and {free / GB:.2f} of {total / GB:.2f} GB are free"
