"""The processor's name."""

import platform
from contextlib import suppress
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def processor_name(device: torch.device) -> str:
    """The processor that the model runs on, by its model name where that is known."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):  # other systems do not have the file
        for line in CPU_INFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
