"""Every kernel of tree attention that the backend would launch, compiled ahead of time.

A case is one call of the backend. Its launches come from the backend itself
(`triton_backend.launched`), so tiles, warps and constants are those of a real call. Sizes of trees,
numbers of splits and words of ancestors are ordinary arguments, for which no kernel is compiled.
Kernels that several cases share are listed once.

Shapes: B batch, H query heads, G key/value heads, N nodes, L slots, E and V head dims.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu_check.compiling import SHARED_MEMORY, Resources, compiled, found_by
from benchmarks.gpu_check.report import Report
from medusa_kit.errors import MedusaKitError
from medusa_kit.infer.attention import triton_backend
from medusa_kit.infer.attention.backend import AttentionCall
from medusa_kit.infer.attention.step import TreeStep
from medusa_kit.installing import extra

H, G, L, WINDOW = 8, 2, 512, 9
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    dtype: str
    head_size: int
    value_size: int
    nodes: int
    window: bool = False
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class Finding:
    """One compiled kernel on one target; `rows`: query rows in a tile, 1 in a merge."""

    kernel: str
    target: int
    case: Case
    rows: int
    warps: int
    resources: Resources

    @property
    def name(self) -> str:
        case, dtype = self.case, SHORT[self.case.dtype]
        if self.kernel == "merge":
            return f"merge {dtype} {case.value_size}" + (" sinks" if case.sinks else "")
        size = f"{case.head_size}" + (f"/{case.value_size}" * (case.value_size != case.head_size))
        words = ["window"] * case.window + ["cap"] * case.softcap
        return " ".join([self.kernel, dtype, size, f"by {self.rows}", *words])


SIZES = ((20, 20), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256))
ONE_TILE_EACH = (1, 8, 64)  # nodes that fill a tile of 16, 32 and 64 rows
OTHER_NODES = (2, 3, 16, 17, 63, 130, 200)  # need no other kernels: several words, partial tiles


def all_cases() -> list[Case]:
    """Float16 and float32 have fewer sizes and features, since only their products differ from
    bfloat16's."""
    onoff = (False, True)
    cases = [
        Case("bfloat16", *sizes, nodes, window, softcap, sinks=window)
        for sizes, nodes, window, softcap in itertools.product(SIZES, ONE_TILE_EACH, onoff, onoff)
    ]
    cases += [
        Case(dtype, size, size, nodes, both, both, sinks=both)
        for dtype, some in (("float16", (64, 128)), ("float32", (20, 64, 128, 256)))
        for size, nodes, both in itertools.product(some, ONE_TILE_EACH, onoff)
    ]
    return cases + [Case("bfloat16", 128, 128, nodes) for nodes in OTHER_NODES]


# Cases that once spilled, took too much memory or were compiled for each size.
QUICK = (
    (89, Case("float32", 256, 256, 64, sinks=True)),
    (90, Case("bfloat16", 128, 128, 64, True, True)),
    (100, Case("bfloat16", 128, 128, 130)),
    (120, Case("bfloat16", 64, 64, 1, window=True)),
)


def check(quick: bool = False) -> Report:
    """Raises MedusaKitError where triton is missing or in interpreter mode."""
    if absent := triton_backend.missing():
        raise MedusaKitError(f"{absent[0]}, so no kernel can be compiled",
                             hint=extra(absent[1]))  # fmt: skip
    if triton_backend.interpreting():
        raise MedusaKitError("TRITON_INTERPRET=1: kernels are interpreted, none is compiled",
                             hint="run it as `python -m benchmarks.gpu_check`")  # fmt: skip
    wanted = QUICK if quick else itertools.product(SHARED_MEMORY, all_cases())
    findings = found_by(_find, _jobs(wanted), processes=1 if quick else os.cpu_count() or 1)
    import triton

    return Report(
        f"Kernels of tree attention compiled by triton {triton.__version__}, by dtype, head size "
        "and rows of a tile: registers a thread and kB of shared memory; w wgmma, t tcgen05, else "
        "mma; - no tensor cores",
        ["kernel", *(f"sm{target}" for target in SHARED_MEMORY)],
        _rows(findings),
        [{"name": finding.name, **asdict(finding)} for finding in findings],
        [miss for finding in findings for miss in misses(finding)],
    )


Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
Job = tuple[int, Case, int]  # target, case, which of its launches


def launches(case: Case) -> list[Launch]:
    """(kernel, arguments, options) of each launch of the backend for a case."""
    found: list[Launch] = []
    dtype = getattr(torch, case.dtype)
    N = case.nodes
    depths_BN = torch.arange(N)[None]
    step = TreeStep([L - N], depths_BN, torch.ones(1, N, N, dtype=torch.bool).tril())
    query_BHNE = torch.empty(1, N, H, case.head_size, dtype=dtype).transpose(1, 2)
    key_BGLE = torch.empty(1, G, L, case.head_size, dtype=dtype)
    value_BGLV = torch.empty(1, G, L, case.value_size, dtype=dtype)
    call = AttentionCall(
        query_BHNE, key_BGLE, value_BGLV, step, 0.1, WINDOW if case.window else None,
        5.0 if case.softcap else None, torch.zeros(H) if case.sinks else None,
    )  # fmt: skip
    triton_backend.launched(
        lambda kernel, grid, *arguments, **options: found.append((kernel, arguments, options)), call
    )
    return found


def _jobs(wanted: Iterable[tuple[int, Case]]) -> list[Job]:
    """The jobs that compile to different kernels, those that take longest first."""
    jobs: dict[str, Job] = {}
    for target, case in wanted:
        for index, (kernel, arguments, options) in enumerate(launches(case)):
            kinds = [
                _kind(name, value) for name, value in zip(kernel.arg_names, arguments, strict=False)
            ]
            key = f"{target} {kernel.__name__} {kinds} {sorted(options.items())}"
            jobs.setdefault(key, (target, case, index))
    return sorted(jobs.values(), key=lambda job: (-job[0], job[1].dtype != "float32"))


def _kind(name: str, value: Any) -> str:
    """How Triton specialises an argument; kernels name the numbers that it must not look at."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if name.startswith("stride"):
        return "1" if value == 1 else str(value % 16 == 0)
    return type(value).__name__


def _find(job: Job) -> Finding:
    target, case, index = job
    kernel, arguments, options = launches(case)[index]
    name = kernel.__name__.removesuffix("_kernel")
    resources = compiled(kernel, arguments, options, target)
    return Finding(name, target, case, options.get("BLOCK_R", 1), options["num_warps"], resources)


def misses(finding: Finding) -> list[str]:
    """The limits that a kernel misses. Float32 may spill and uses no tensor cores."""
    where, taken = f"{finding.name}, sm{finding.target}", finding.resources
    found = []
    if taken.shared > SHARED_MEMORY[finding.target]:
        limit = SHARED_MEMORY[finding.target]
        found.append(f"{where}: {taken.shared} bytes of shared memory, the device has {limit}")
    if finding.case.dtype in HALF and taken.stack:
        found.append(f"{where}: {taken.stack} bytes spilled a thread, expected none")
    if finding.case.dtype in HALF and finding.kernel == "split" and taken.products is None:
        found.append(f"{where}: no product uses the tensor cores")
    return found


def _rows(findings: Sequence[Finding]) -> list[list[str]]:
    names = sorted({finding.name for finding in findings})
    cells = {(finding.name, finding.target): _cell(finding) for finding in findings}
    return [[name, *(cells.get((name, target), "") for target in SHARED_MEMORY)] for name in names]


def _cell(finding: Finding) -> str:
    taken = finding.resources
    marks = {"wgmma": " w", "tcgen05": " t", "mma": "", None: " -"}
    if finding.kernel == "merge":  # no products, hardly any shared memory
        return f"{taken.registers}" + (f" {taken.stack} spilled" if taken.stack else "")
    spilled = f" {taken.stack} spilled" if taken.stack else ""
    return f"{taken.registers} {taken.shared / 1024:.0f}{marks[taken.products]}{spilled}"
