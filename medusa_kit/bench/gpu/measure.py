"""The whole run: its parts in order of importance, device, budget, report.

What is left out for time stands at the end. Parts of one shape follow each other where that costs
nothing, since a model is made anew for each.
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
from medusa_kit.bench.gpu.workbench import BANDWIDTH, COMPILED, LOOP, Way, Workbench
from medusa_kit.errors import ConfigError
from medusa_kit.settings.engine import Attention

NODES = (1, 16, 64)
BATCH = 8
ATTENTION: tuple[Attention, ...] = ("triton", "sdpa", "flash")
GOALS = (
    Goal("8B, one node, × the floor", step_name(LLAMA_8B, 1), "times_floor", 1.15),
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

    `goes_on`: with the report at `path`: its parts are kept, broken ones too, but those left out
    for time. `only`: the parts whose name holds this, and the floor. Raises ConfigError where none
    does, DataError where `path` is no report, DeviceLost where another process has to go on.
    """
    report = Report(device, dry_run, path, GOALS, goes_on)
    report.setup["shapes"] = [asdict(shape) for shape in _shapes(dry_run)]
    wanted = parts(small=dry_run)
    if only is not None:
        named = {part.name for part in wanted if only.lower() in part.name.lower()}
        if not named:
            raise ConfigError(
                f"--only {only!r} is in no part's name", hint="for instance 8B, prompt or training"
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
    """For a dry run: what would be compiled, which takes minutes, runs as it is written; and in one
    thread, since several only wait for each other over so little.
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
        # A profiler stays in the process, so what is timed before has not met it.
        kernels_part(large, 64),
        kernels_part(large, 64, LOOP),
        # Minutes of compiling: an engine's self-check has two trees, and each step is one more.
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
    """Each backend where it can run: flash reads lengths on the host, so in the loop alone."""
    for name in ATTENTION:
        way = Way(captured=name != "flash", attention=name)
        yield step_part(shape, 64, way)
        if name != "flash":
            yield step_part(shape, 64, way, LONG_PREFIX)
    yield step_part(shape, 64, Way(captured=False, attention="triton"))
    yield step_part(shape, 64, Way(captured=False, attention="sdpa"))


def _drafts(shape: Shape) -> Iterator[Part]:
    yield from (draft_part(shape, kind) for kind in ("medusa", "hydra"))
