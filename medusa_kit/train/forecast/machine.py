"""What this process has taken of the machine, and how fast the machine multiplies."""

import sys
import time

import torch


def peak_bytes(device: torch.device) -> float:
    """The most memory that this process has had: the GPU's where it computes there."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def products_a_second(device: torch.device, dtype: torch.dtype) -> float:
    """Multiplications with addition of a matrix product of usual shapes, a second."""
    rows, width = 256, 2048
    a, b = (torch.ones(n, width, device=device, dtype=dtype) for n in (rows, width))
    times = []
    for _ in range(4):
        began = time.monotonic()
        (a @ b.T).sum().item()
        times.append(time.monotonic() - began)
    return rows * width * width / max(min(times), 1e-9)
