"""The kernels of the fused forward, compiled for a GPU that is not there.

Launches come from the forward itself, over a model of one layer with the widths of a real one, so
tiles, warps and constants are those of a real call. Numbers of nodes, rows and slots are ordinary
arguments, for which no kernel is compiled.

Shapes: T nodes, B rows of the cache, S slots.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_check.compiling import SHARED_MEMORY, Resources, compiled, found_by
from benchmarks.gpu_check.kernels import SHORT
from benchmarks.gpu_check.report import Report
from medusa_kit.base.model import wrap_model
from medusa_kit.errors import MedusaKitError
from medusa_kit.infer.attention import triton_backend
from medusa_kit.infer.device.fused_forward import FusedForward, Nodes
from medusa_kit.infer.device.fused_model import FusedModel
from medusa_kit.installing import extra

T, B, S = 16, 2, 512
# Widths of a layer: hidden, query heads, key/value heads, head size, MLP.
SHAPES: dict[str, tuple[str, tuple[int, int, int, int, int], dict[str, Any]]] = {
    "llama 8B": ("llama", (4096, 32, 8, 128, 1024), {}),
    "qwen2 1.5B": ("qwen2", (1536, 12, 2, 128, 1024), {}),
    "qwen3 4B": ("qwen3", (2560, 32, 8, 128, 1024), {}),
    "mistral window": ("mistral", (4096, 32, 8, 128, 1024), {"sliding_window": 64}),
    "gemma3 1B": ("gemma3_text", (1152, 4, 1, 256, 1024), {"sliding_window": 64,
                                                          "layer_types": ["sliding_attention"]}),
    "smollm2": ("llama", (576, 9, 3, 64, 1024), {}),
}  # fmt: skip
DTYPES = ("bfloat16", "float32")
QUICK = ((80, "smollm2", "bfloat16"), (89, "gemma3 1B", "float32"),
         (90, "llama 8B", "bfloat16"), (100, "mistral window", "bfloat16"))  # fmt: skip
SUMS = ("product", "prefix", "tail")  # the kernels that need much

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
Job = tuple[int, str, str, int]  # target, shape, dtype, which of its launches


@dataclass(frozen=True)
class Finding:
    kernel: str
    target: int
    shape: str
    dtype: str
    constants: str
    resources: Resources

    @property
    def name(self) -> str:
        return f"{self.kernel} {SHORT[self.dtype]} {self.shape}"


def check(quick: bool = False) -> Report:
    """Raises MedusaKitError where triton is missing or in interpreter mode."""
    if absent := triton_backend.missing():
        raise MedusaKitError(f"{absent[0]}, so no kernel can be compiled",
                             hint=extra(absent[1]))  # fmt: skip
    if triton_backend.interpreting():
        raise MedusaKitError("TRITON_INTERPRET=1: kernels are interpreted, none is compiled",
                             hint="run it as `python -m benchmarks.gpu_check`")  # fmt: skip
    wanted = QUICK if quick else tuple(itertools.product(SHARED_MEMORY, SHAPES, DTYPES))
    jobs = _jobs(wanted)
    if quick:
        jobs = [job for job in jobs if job[0] == QUICK[0][0] or _name(job) in SUMS]
    findings = found_by(_find, jobs, processes=1 if quick else os.cpu_count() or 1)
    return Report(
        "Kernels of the fused forward compiled: registers a thread and kB of shared memory; w "
        "wgmma, t tcgen05, m mma",
        ["kernel", *(f"sm{target}" for target in SHARED_MEMORY)],
        _rows(findings),
        [{"name": finding.name, **asdict(finding)} for finding in findings],
        [miss for finding in findings for miss in misses(finding)],
    )


@cache
def launches(shape: str, dtype: str) -> list[Launch]:
    """(kernel, arguments, options) of each launch of a forward with the exact products."""
    found: list[Launch] = []
    base = wrap_model(_model(*SHAPES[shape]).to(getattr(torch, dtype)))
    fused = FusedModel.of(base)
    forward = FusedForward(
        fused,
        exact=True,
        run=lambda kernel, grid, *arguments, **options: found.append((kernel, arguments, options)),
    )
    whole_T, rows_B = torch.zeros(T, dtype=torch.int64), torch.zeros(B, dtype=torch.int64)
    nodes = Nodes(
        whole_T, whole_T, whole_T, whole_T, whole_T, whole_T[:, None], rows_B, rows_B, rows_B, T, S
    )
    parts = fused.parts
    block = torch.zeros(
        len(fused.layers), 2, B, parts.kv_heads, S, parts.head_size, dtype=fused.dtype
    )
    with torch.no_grad():
        forward(nodes, block)
    return found


def _model(kind: str, sizes: tuple[int, int, int, int, int], more: dict[str, Any]) -> Any:
    hidden, heads, groups, head_size, size = sizes
    config = AutoConfig.for_model(
        kind, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=groups,
        head_dim=head_size, intermediate_size=size, num_hidden_layers=1, vocab_size=16384,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def _jobs(wanted: Iterable[tuple[int, str, str]]) -> list[Job]:
    """The jobs that compile to different kernels."""
    jobs: dict[str, Job] = {}
    for target, shape, dtype in wanted:
        for index, (kernel, arguments, options) in enumerate(launches(shape, dtype)):
            kinds = [str(getattr(one, "dtype", type(one))) for one in arguments]
            key = f"{target} {kernel.__name__} {kinds} {sorted(options.items())}"
            jobs.setdefault(key, (target, shape, dtype, index))
    return list(jobs.values())


def _name(job: Job) -> str:
    _, shape, dtype, index = job
    return str(launches(shape, dtype)[index][0].__name__.removesuffix("_kernel"))


def _find(job: Job) -> Finding:
    target, shape, dtype, index = job
    kernel, arguments, options = launches(shape, dtype)[index]
    resources = compiled(kernel, arguments, options, target)
    return Finding(_name(job), target, shape, dtype, str(sorted(options.items())), resources)


def misses(finding: Finding) -> list[str]:
    """The limits that a kernel misses. Float32 may spill."""
    where, taken = f"{finding.name}, sm{finding.target}", finding.resources
    found = []
    if taken.shared > SHARED_MEMORY[finding.target]:
        limit = SHARED_MEMORY[finding.target]
        found.append(f"{where}: {taken.shared} bytes of shared memory, the device has {limit}")
    if finding.dtype != "float32" and taken.stack:
        found.append(f"{where}: {taken.stack} bytes spilled a thread, expected none")
    if finding.dtype != "float32" and finding.kernel in SUMS:
        found += [] if taken.products else [f"{where}: no product uses the tensor cores"]
    return found


def _rows(findings: Sequence[Finding]) -> list[list[str]]:
    cells: dict[tuple[str, int], list[str]] = {}
    for finding in findings:
        cells.setdefault((finding.name, finding.target), []).append(_cell(finding.resources))
    names = list(dict.fromkeys(finding.name for finding in findings))
    return [
        [name, *("; ".join(cells.get((name, target), [])) for target in SHARED_MEMORY)]
        for name in names
    ]


def _cell(taken: Resources) -> str:
    mark = {"wgmma": " w", "tcgen05": " t", "mma": " m", None: ""}[taken.products]
    spilled = f" {taken.stack} spilled" if taken.stack else ""
    return f"{taken.registers} {taken.shared / 1024:.0f}{mark}{spilled}"
