"""The five commands: their parts in order of importance.

The last parts are the first to be left out for time. Parts of one shape follow each other, since
each change of shape makes a new model.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu.attention import attention_parts
from benchmarks.gpu.baseline import BASELINES, baseline_part
from benchmarks.gpu.captures import capture_part
from benchmarks.gpu.correctness import suite_part
from benchmarks.gpu.decoding import (
    ACCEPTANCE,
    TEMPERATURE,
    answer_name,
    answer_part,
    draft_part,
)
from benchmarks.gpu.exactness import compiled_exactness_part, exactness_parts
from benchmarks.gpu.load import load_part
from benchmarks.gpu.memory import bandwidth_part, products_parts
from benchmarks.gpu.processes import apart
from benchmarks.gpu.prompts import CHUNKS, prompt_part
from benchmarks.gpu.report import Goal, Report
from benchmarks.gpu.runner import Part, run_parts
from benchmarks.gpu.steps import (
    LONG_PREFIX,
    dynamic_step_part,
    kernels_part,
    sampled_step_part,
    step_name,
    step_part,
)
from benchmarks.gpu.training import training_part
from benchmarks.gpu.workbench import BANDWIDTH, COMPILED, LOOP, Workbench
from medusa_kit.bench.gpu.shapes import LLAMA_8B, SMOLLM2_135M, Shape, tiny
from medusa_kit.errors import ConfigError

NODES = (1, 16, 64)
PDL = {"TORCHINDUCTOR_ENABLE_PDL": "1"}  # a kernel begins while the one before it ends
GOALS = (
    Goal("8B, plain decoding, × the floor", step_name(LLAMA_8B, 1), "times_floor", 1.15),
    Goal("8B, 64 nodes, × the floor", step_name(LLAMA_8B, 64), "times_floor", 1.25),
    Goal("8B, 64 nodes, host syncs a step", step_name(LLAMA_8B, 64), "host_syncs", 1),
    Goal(f"8B, acceptance {ACCEPTANCE}, × transformers generate",
         answer_name(LLAMA_8B, 0.0, ACCEPTANCE), "against_transformers", 4, at_least=True),
)  # fmt: skip
GOALS_OF = 2  # the command that has their parts


def correct(large: Shape, little: Shape) -> Iterator[Part]:
    """First of all, and what the device can do at best."""
    yield suite_part()
    yield bandwidth_part()
    yield from products_parts(large)
    yield from exactness_parts()


def steps(large: Shape, little: Shape) -> Iterator[Part]:
    yield bandwidth_part()
    yield from (step_part(large, nodes) for nodes in (64, 1, 16))
    yield step_part(large, 64, prefix=LONG_PREFIX)
    yield baseline_part(large, "plain")
    yield from (answer_part(large, 0.0, acceptance) for acceptance in (ACCEPTANCE, None))
    yield from (step_part(large, nodes, LOOP) for nodes in NODES)
    yield from (baseline_part(large, how) for how in BASELINES if how != "plain")
    yield baseline_part(large, "plain", TEMPERATURE)
    yield answer_part(large, TEMPERATURE, None)  # drawn tokens are not known beforehand
    # The profiler stays active in the process, so it comes after everything that is timed.
    yield kernels_part(large, 64)


def compiled(large: Shape, little: Shape) -> Iterator[Part]:
    """Compiling takes minutes, so what takes seconds comes before."""
    yield bandwidth_part()
    yield from attention_parts(large)
    yield from (prompt_part(large, LONG_PREFIX, chunk) for chunk in CHUNKS)
    for rows in (8, 32):
        yield from (step_part(large, nodes, rows=rows) for nodes in (1, 8, 16))
    steps = [step_part(large, nodes, COMPILED) for nodes in (64, 1)]
    yield from steps
    yield from (apart(3, step, PDL, "PDL") for step in steps)


def under_load(large: Shape, little: Shape) -> Iterator[Part]:
    yield capture_part(large)
    for clients in (32, 1, 8):
        yield from (load_part(large, clients, kind) for kind in ("medusa", "auto", "sampled"))


def the_rest(large: Shape, little: Shape) -> Iterator[Part]:
    yield bandwidth_part()
    yield training_part(large)
    yield sampled_step_part(large, 64)
    yield dynamic_step_part(large, 64)
    yield from (draft_part(large, kind) for kind in ("medusa", "hydra", "recurrent"))
    yield training_part(little)
    yield from (step_part(little, nodes) for nodes in NODES)
    yield from (step_part(little, nodes, LOOP) for nodes in NODES)
    yield compiled_exactness_part()
    yield kernels_part(little, 64)


COMMANDS: dict[int, tuple[str, Callable[[Shape, Shape], Iterator[Part]]]] = {
    1: ("correctness, and what the device can do", correct),
    2: ("8B: steps, answers, transformers", steps),
    3: ("8B: compiled, attention, prompts, many rows", compiled),
    4: ("8B: a batch under load, captures", under_load),
    5: ("training, sampled and grown trees, drafts, a small model", the_rest),
}


def parts(command: int, small: bool) -> list[Part]:
    """`small`: tiny shapes under the same names, for a dry run."""
    shapes = [tiny(shape) if small else shape for shape in (LLAMA_8B, SMOLLM2_135M)]
    return list(COMMANDS[command][1](*shapes))


def find(command: int, name: str, small: bool) -> Part:
    """Raises ConfigError for a name that is none of a part."""
    found = [part for part in parts(command, small) if part.name == name]
    if not found:
        raise ConfigError(f"command {command} has no part {name!r}", hint="leave out --part")
    return found[0]


def measure(
    command: int,
    device: torch.device,
    dry_run: bool,
    path: Path,
    minutes: float,
    goes_on: bool = False,
    only: str | None = None,
) -> Report:
    """Run the parts, saving the report at `path` after each; what they write lies beside it.

    `goes_on`: continue the report at `path`: all its parts are kept, broken ones too, except those
    left out for time. `only`: the parts whose names contain this, and the floor. Raises ConfigError
    where none does, DataError where `path` is not such a report, DeviceLost where another process
    has to continue.
    """
    wanted = parts(command, small=dry_run)
    if only is not None:
        named = {part.name for part in wanted if only.lower() in part.name.lower()}
        if not named:
            told = ", ".join(part.name for part in wanted)
            raise ConfigError(f"no part's name contains --only {only!r}", hint=f"there are {told}")
        wanted = [part for part in wanted if part.name in named | {BANDWIDTH}]
    path.parent.mkdir(parents=True, exist_ok=True)
    goals = GOALS if command == GOALS_OF else ()
    report = Report(device, dry_run, path, goals, goes_on)
    report.setup["shapes"] = [asdict(LLAMA_8B), asdict(SMOLLM2_135M)] if not dry_run else []
    for part in wanted:
        if part.name in report.records and report.records[part.name].status == "left out":
            del report.records[part.name]
    bench = Workbench(device, dry_run, report.figures, path.parent)
    with on(device, dry_run):
        run_parts(wanted, bench, report, minutes)
    return report


@contextlib.contextmanager
def on(device: torch.device, dry_run: bool) -> Iterator[None]:
    """Where parts run. A dry run is without compiling, which takes minutes, and in one thread,
    since several would only wait for each other on so little work."""
    if not dry_run:
        with torch.cuda.device(device):
            yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.set_num_threads(threads)
