"""What `medusa-kit doctor --gpu` finds: versions, the self-check, captured or why not, steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.table import Table

from medusa_kit import console
from medusa_kit.bench.gpu.clock import Clock
from medusa_kit.bench.gpu.setup import describe
from medusa_kit.bench.gpu.shapes import (
    LLAMA_1B,
    LLAMA_8B,
    SMOLLM2_135M,
    Shape,
    random_base,
    tiny,
)
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import build_engine
from medusa_kit.errors import DeviceMemoryError
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.engine import EngineOptions
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.transfer import to_device
from medusa_kit.tree.shape import ROOT, shape_of

NODES = (1, 16, 64)
PREFIX, STEPS, SYNC_STEPS = 512, 30, 5
ROOM = 1.3  # times a model's weights: memory that must be free for it and what its steps need
NO_MEASUREMENT = "dry run on a tiny shape on the CPU: no figure in here is a measurement"
NONE = "–"


class WideDrafter(Drafter):
    """Proposes the tokens 0, 1, … after the root, at almost no cost; a draft token may be right."""

    name = "wide"

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self.num_nodes = num_nodes
        self._shape = shape_of((ROOT, *[0] * (num_nodes - 1)))
        self._guesses = to_device(list(range(num_nodes - 1)), device)

    def propose(self, state: State) -> Forest:
        B = len(state.roots_B)
        roots_B1 = to_device(state.roots_B, self._guesses.device)[:, None]
        tokens_BN = torch.cat([roots_B1, self._guesses.expand(B, -1)], dim=1)
        return Forest(tokens_BN.flatten(), [self._shape] * B)


def examine_gpu(device: torch.device, dry_run: bool) -> dict[str, Any]:
    """Raises MedusaKitError where no engine can be built."""
    shape = tiny(LLAMA_8B) if dry_run else largest_that_fits(device)
    console.note(_weights(shape.name, dry_run))
    start = time.perf_counter()
    base = random_base(shape, device, torch.bfloat16)
    options = EngineOptions(heads=None)
    if dry_run:  # `auto` would take the C++ decoder, which is not what this is about
        options = replace(options, attention="sdpa", fixed_shapes="always")
    engine = build_engine(base, options)
    seconds = time.perf_counter() - start
    steps = [_steps(engine, shape, nodes, dry_run) for nodes in NODES]
    verifier = engine.verifier
    captured = isinstance(verifier, CapturedVerifier) and verifier.refused is None
    return {
        "kind": "medusa-kit gpu",
        "version": 2,
        "dry_run": dry_run,
        **({"note": NO_MEASUREMENT} if dry_run else {}),
        "setup": describe(device),
        "model": shape.name,
        "load_seconds": round(seconds, 2),
        "self_check": {
            "relative_error": engine.check.relative_error,
            "rounding_tolerance": engine.rounding_tolerance,
        },
        "attention": engine.attention.report(),
        "captured": captured,
        "steps_run_by": engine.steps_run_by,  # says why, where they are not captured
        "steps": steps,
    }


def largest_that_fits(device: torch.device) -> Shape:
    """Raises DeviceMemoryError where none does."""
    free, _ = torch.cuda.mem_get_info(device)
    for shape in (LLAMA_8B, LLAMA_1B, SMOLLM2_135M):
        if ROOM * shape.all_weights * 2 <= free:
            return shape
    needed = ROOM * SMOLLM2_135M.all_weights * 2
    raise DeviceMemoryError(
        f"{free / 1e9:.1f} GB of the GPU's memory are free; the smallest model needs "
        f"{needed / 1e9:.1f}",
        hint="end what else runs on it",
    )


def _weights(name: str, dry_run: bool) -> str:
    return f"random weights {'of a tiny Llama' if dry_run else f'in the shape of {name}'}"


def _steps(engine: Engine, shape: Shape, nodes: int, dry_run: bool) -> dict[str, Any]:
    """Steps of the decoding loop, host and device together, from one emission to the next."""
    clock = Clock(engine.base.device)
    steps, prefix = (3, 12) if dry_run else (STEPS, PREFIX)
    verifier = engine.verifier
    loose = verifier.num_loose if isinstance(verifier, CapturedVerifier) else 0
    with _decoding(engine, shape, nodes, prefix, 3 * steps) as next_step:
        timing = clock.each(next_step, steps)
        syncs = clock.syncs(next_step, SYNC_STEPS)
    captured = isinstance(verifier, CapturedVerifier) and verifier.num_loose == loose
    return {
        "nodes": nodes,
        "captured": captured,
        "ms": 1e3 * timing.median,
        "least_ms": 1e3 * timing.least,
        "host_syncs": syncs,
    }


@contextmanager
def _decoding(
    engine: Engine, shape: Shape, nodes: int, prefix: int, steps: int
) -> Iterator[Callable[[], Any]]:
    """A function that takes the next step after a prompt; an answer has that many at least."""
    drafter: Drafter = PlainDrafter(engine.base.device)
    if nodes > 1:
        drafter = WideDrafter(nodes, engine.base.device)
    generator = torch.Generator().manual_seed(prefix)
    ids = torch.randint(0, shape.vocab_size, (prefix,), generator=generator).tolist()
    row = make_request(engine.verifier, ids, SamplingParams(), 2 * steps)
    running = Scheduler(engine.verifier).run([row], drafter)
    try:
        next(running)
        yield partial(next, running)
    finally:
        running.close()  # type: ignore[attr-defined]  # it is a generator


def print_findings(findings: dict[str, Any]) -> None:
    for table in _tables(findings):
        console.out.print(table)


def _tables(findings: dict[str, Any]) -> Iterator[Table]:
    setup, check = findings["setup"], findings["self_check"]
    title = NO_MEASUREMENT if findings["dry_run"] else setup["device"]
    rows = [(name, str(value)) for name, value in setup.items()
            if value is not None and not isinstance(value, dict)]  # fmt: skip
    torchs = setup["sdpa"]
    on = [name for name in torchs["order"] if torchs["on"].get(name.removesuffix("_attention"))]
    rows += [("SDPA, in order", ", ".join(on)), ("cuDNN", str(torchs["cudnn"] or NONE))]
    rows += [("model", _weights(findings["model"], findings["dry_run"]))]
    rows += [("self-check", f"passed, error {check['relative_error']:.1e}")]
    rows += [("attention", findings["attention"]["used"])]
    rows += [("not used", line) for line in findings["attention"]["fallbacks"]]
    captured = "yes" if findings["captured"] else "no"
    rows += [("captured", "not on a CPU" if findings["dry_run"] else captured)]
    rows += [("steps", findings["steps_run_by"])]
    yield console.table(title, ("what", "found"), rows)
    steps = [
        (
            str(step["nodes"]),
            f"{step['ms']:.3f}",
            f"{step['least_ms']:.3f}",
            NONE if findings["dry_run"] else "yes" if step["captured"] else "no",
            NONE if step["host_syncs"] is None else f"{step['host_syncs']:.1f}",
        )
        for step in findings["steps"]
    ]
    columns = ("nodes", "ms", "least", "captured", "waits of the host")
    none = " (no measurement)" if findings["dry_run"] else ""
    yield console.table(f"Steps after {PREFIX} tokens{none}", columns, steps)
