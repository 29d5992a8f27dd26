"""Compiles Triton kernels for a GPU that is not there, and reads which resources they need.

Triton compiles what a launch would compile: types, alignment and which numbers are 1 come from the
arguments of a real call. Only the driver is missing, which gives the target; a stand-in that
launches nothing takes its place.
"""

import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from medusa_kit import console
from medusa_kit.errors import MedusaKitError

# Most shared memory of one program, in bytes (CUDA programming guide, compute capabilities).
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TENSOR_CORES = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma", "mma": "mma.sync"}
WARP = 32
Job, Found = TypeVar("Job"), TypeVar("Found")


@dataclass(frozen=True)
class Resources:
    """The resources of one program of a compiled kernel. `stack`: bytes a thread, all of them
    spilled registers, since the kernels have no arrays. `products`: the tensor-core instruction."""

    registers: int
    stack: int
    shared: int
    products: str | None


class _NoDevice:
    """The parts of a driver that compiling needs: a target, and a device number for the cache."""

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
    """The resources of the kernel that these arguments would launch on a GPU of that capability."""
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
        dump = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=False
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", dump.stdout)
    if found is None:
        raise MedusaKitError(f"cuobjdump gives no registers: {dump.stdout or dump.stderr}")
    return int(found[1]), int(found[2])


def found_by(find: Callable[[Job], Found], jobs: Sequence[Job], processes: int) -> list[Found]:
    """What `find`, a function of a module, says of each job, in this many processes."""
    if processes == 1:
        return [find(job) for job in jobs]
    context = multiprocessing.get_context("spawn")
    found = []
    with (
        ProcessPoolExecutor(processes, mp_context=context) as pool,
        console.progress("kernels", len(jobs), unit="kernel") as bar,
    ):
        for finding in pool.map(find, jobs):
            found.append(finding)
            bar.advance(1)
    return found
