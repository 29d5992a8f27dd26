"""The whole run: its parts in order of importance, device, budget, report.

The last parts are the first to be left out for time. Where the order allows it, parts of one shape
follow each other, since each change of shape makes a new model.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from medusa_kit.bench.gpu.decoding import (
    ACCEPTANCE,
    TEMPERATURE,
    answer_name,
    answer_part,
    draft_part,
    transformers_part,
)
from medusa_kit.bench.gpu.exactness import compiled_exactness_part, exactness_parts
from medusa_kit.bench.gpu.report import Goal, Report
from medusa_kit.bench.gpu.runner import Part, run_parts
from medusa_kit.bench.gpu.shapes import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, Shape, tiny
from medusa_kit.bench.gpu.steps import (
    LONG_PREFIX,
    PREFIX,
    bandwidth_part,
    kernels_part,
    prompt_part,
    step_name,
    step_part,
)
from medusa_kit.bench.gpu.training import training_part
from medusa_kit.bench.gpu.vllm_peer import vllm_part
from medusa_kit.bench.gpu.workbench import BANDWIDTH, COMPILED, LOOP, StepMode, Workbench
from medusa_kit.errors import ConfigError
from medusa_kit.settings.engine import Attention

NODES = (1, 16, 64)
BATCH = 8
ATTENTION: tuple[Attention, ...] = ("triton", "sdpa", "flash")
GOALS = (
    Goal("8B, plain decoding, × the floor", step_name(LLAMA_8B, 1), "times_floor", 1.15),
    Goal("8B, 64 nodes, × the floor", step_name(LLAMA_8B, 64), "times_floor", 1.25),
    Goal("8B, 64 nodes, host syncs a step", step_name(LLAMA_8B, 64), "host_syncs", 1),
    Goal(f"8B, acceptance {ACCEPTANCE}, × transformers generate",
         answer_name(LLAMA_8B, 0.0, ACCEPTANCE), "against_transformers", 4, at_least=True),
)  # fmt: skip


def measure(
    device: torch.device,
    dry_run: bool = False,
    path: Path | None = None,
    minutes: float = 9.0,
    goes_on: bool = False,
    only: str | None = None,
) -> Report:
    """Run the parts, saving the report at `path` after each.

    `goes_on`: continue the report at `path`: all its parts are kept, broken ones too, except those
    left out for time. `only`: the parts whose names contain this, and the floor. Raises ConfigError
    where none does, DataError where `path` is not such a report, DeviceLost where another process
    has to continue.
    """
    report = Report(device, dry_run, path, GOALS, goes_on)
    report.setup["shapes"] = [asdict(shape) for shape in _shapes(dry_run)]
    wanted = parts(small=dry_run)
    if only is not None:
        named = {part.name for part in wanted if only.lower() in part.name.lower()}
        if not named:
            raise ConfigError(
                f"no part's name contains --only {only!r}", hint="try 8B, prompt or training"
            )
        wanted = [part for part in wanted if part.name in named | {BANDWIDTH}]
    for part in wanted:
        if part.name in report.records and report.records[part.name].status == "left out":
            del report.records[part.name]
    with _on(device), _as_written() if dry_run else contextlib.nullcontext():
        run_parts(wanted, Workbench(device, dry_run, report.figures), report, minutes)
    return report


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """For a dry run: without compiling, which takes minutes, and in one thread, since several would
    only wait for each other on so little work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.set_num_threads(threads)


def parts(small: bool) -> list[Part]:
    """`small`: tiny shapes under the same names, for a dry run."""
    little, middle, large = _shapes(small)
    return [
        bandwidth_part(),
        *exactness_parts(),
        *_core(little),
        *_core(large),
        *_attention(large),
        *_loop(large),
        *_drafts(large),
        *_drafts(little),
        training_part(little),
        *_loop(little),
        *_attention(little),
        *_core(middle),
        *_loop(middle),
        *_drafts(middle),
        *_attention(middle),
        # The profiler stays active in the process, so it comes after everything that is timed.
        kernels_part(large, 64),
        kernels_part(large, 64, LOOP),
        # These compile for minutes: two trees in the self-check, and one more for each step.
        *(step_part(large, nodes, COMPILED) for nodes in (64, 1, 16)),
        compiled_exactness_part(),
        *(step_part(little, nodes, COMPILED) for nodes in (64, 1, 16)),
        *(step_part(middle, nodes, COMPILED) for nodes in (64, 1, 16)),
        kernels_part(little, 64),
        vllm_part(large),
    ]


def _shapes(small: bool) -> list[Shape]:
    shapes = (SMOLLM2_135M, LLAMA_1B, LLAMA_8B)
    return [tiny(shape) for shape in shapes] if small else list(shapes)


def _core(shape: Shape) -> Iterator[Part]:
    yield from (transformers_part(shape, temperature) for temperature in (0.0, TEMPERATURE))
    yield from (step_part(shape, nodes) for nodes in NODES)
    yield from (answer_part(shape, 0.0, acceptance) for acceptance in (ACCEPTANCE, None))
    yield prompt_part(shape, PREFIX)
    yield from (answer_part(shape, TEMPERATURE, acceptance) for acceptance in (ACCEPTANCE, None))
    yield step_part(shape, 64, prefix=LONG_PREFIX)
    yield step_part(shape, 16, rows=BATCH)


def _loop(shape: Shape) -> Iterator[Part]:
    yield from (step_part(shape, nodes, LOOP) for nodes in NODES)
    yield answer_part(shape, 0.0, ACCEPTANCE, LOOP)


def _attention(shape: Shape) -> Iterator[Part]:
    """Each backend where it can run: flash only in the loop, since it reads lengths on the host."""
    for name in ATTENTION:
        mode = StepMode(captured=name != "flash", attention=name)
        yield step_part(shape, 64, mode)
        if name != "flash":
            yield step_part(shape, 64, mode, LONG_PREFIX)
    yield step_part(shape, 64, StepMode(captured=False, attention="triton"))
    yield step_part(shape, 64, StepMode(captured=False, attention="sdpa"))


def _drafts(shape: Shape) -> Iterator[Part]:
    yield from (draft_part(shape, kind) for kind in ("medusa", "hydra", "recurrent"))
