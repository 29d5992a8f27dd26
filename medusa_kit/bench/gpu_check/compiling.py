"""Compiling Triton kernels for a GPU that is not there, and reading what they take.

Triton compiles what a launch would compile: from the arguments of a real call it takes types,
alignment and which numbers are 1, so nothing here says by itself what is launched. All that is
missing is the driver, which tells it the target; here one stands in that launches nothing.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_kit.errors import MedusaKitError

# Shared memory that one program may have, in bytes (CUDA programming guide, compute capabilities).
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TENSOR_CORES = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma", "mma": "mma.sync"}
WARP = 32


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes. `stack`: bytes a thread, all of them spilled
    registers, since the kernels have no arrays. `products`: what the tensor cores are asked for."""

    registers: int
    stack: int
    shared: int
    products: str | None


class _NoDevice:
    """A driver as far as compiling asks: a target, and a device number for Triton's own cache."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, WARP)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(
    kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], capability: int
) -> Resources:
    """What the kernel takes that these arguments would launch on a GPU of that capability."""
    from triton.runtime import driver

    driver.set_active(_NoDevice(capability))
    result = kernel.warmup(*arguments, grid=(1,), **options)
    registers, stack = _registers_and_stack(result.asm["cubin"])
    products = (name for name, word in TENSOR_CORES.items() if word in result.asm["ptx"])
    return Resources(registers, stack, result.metadata.shared, next(products, None))


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=False
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    if found is None:
        raise MedusaKitError(f"cuobjdump tells no registers: {told.stdout or told.stderr}")
    return int(found[1]), int(found[2])
