"""The device, and the versions and settings that figures are measured with."""

import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.processor import processor_name
from medusa_kit.version import __version__

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "deepspeed")
DRIVER = Path("/proc/driver/nvidia/version")
# What other work on the device, heat or limits of power do to figures.
STATE = ("driver_version", "clocks.sm", "clocks.mem", "clocks_throttle_reasons.active",
         "utilization.gpu", "memory.used", "temperature.gpu", "power.draw")  # fmt: skip


def describe(device: torch.device) -> dict[str, Any]:
    """The device, the versions that figures are measured with, and the date."""
    description: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": processor_name(device),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "medusa_kit": __version__,
        "cuda": torch.version.cuda,
        **_versions(PACKAGES),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        state = _state(device)
        description |= {
            "driver": state.get("driver_version") or _driver(),
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "state": state,
        }
    return description | {"sdpa": sdpa()}


def sdpa() -> dict[str, Any]:
    """torch's own attention: what is on, in which order, and cuDNN's version. A kernel of cuDNN has
    a plan for each length, so where it comes first a step of a new length pays for one."""
    cuda = torch.backends.cuda
    order: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    names = {int(kind): name.lower() for name, kind in _kinds()}
    return {
        "cudnn": torch.backends.cudnn.version(),
        "order": [names.get(number, str(number)) for number in order],
        "on": {
            "flash": cuda.flash_sdp_enabled(),
            "efficient": cuda.mem_efficient_sdp_enabled(),
            "cudnn": cuda.cudnn_sdp_enabled(),
            "math": cuda.math_sdp_enabled(),
        },
    }


def _kinds() -> Iterable[tuple[str, Any]]:
    from torch.nn.attention import SDPBackend

    return SDPBackend.__members__.items()


def _versions(packages: Iterable[str]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _state(device: torch.device) -> dict[str, str]:
    """Driver, clocks and load by nvidia-smi; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader"]
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        command += ["-i", f"GPU-{uuid}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError, AttributeError):
        return {}
    return dict(zip(STATE, map(str.strip, done.stdout.split(",")), strict=False))


def _driver() -> str | None:
    """The NVIDIA driver's version, from the kernel module."""
    return DRIVER.read_text().splitlines()[0] if DRIVER.is_file() else None
