"""Tells errors of full memory from all others."""

import torch

from medusa_kit.errors import DeviceMemoryError

CPU_SAYS = "DefaultCPUAllocator"  # torch raises a plain RuntimeError there


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was too small, the accelerator's or the machine's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | DeviceMemoryError):
        return True
    return isinstance(error, RuntimeError) and CPU_SAYS in str(error)
