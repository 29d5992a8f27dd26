"""Where a decoding step's time goes, compared with the time to read the weights once.

Requests are decoded as `generate` decodes them, and each step says what it took
(infer/decode/timing.py). On CUDA torch's profiler gives the time of each kernel (`kernels`).

Shapes: D in, O out.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from medusa_kit.base.quantization import stored_bytes
from medusa_kit.bench.report import ONE_NODE
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.timing import StepTiming
from medusa_kit.settings.sampling import SamplingParams

DRAFTING, FORWARD, ACCEPT, REST = PARTS = ("drafting", "forward", "accept", "rest")
ATTENTION, LINEAR = "attention", "linear layers"
# Kinds of kernels by parts of their names, in lower case; the first match counts.
KERNELS = {
    ATTENTION: ("flash", "fmha", "attention", "attend", "split_kernel", "merge_kernel"),
    LINEAR: ("gemm", "gemv", "cutlass", "nvjet", "cublas", "splitk"),
    "copies": ("memcpy", "memset"),
}
OTHER = "other kernels"
FLOOR_BUFFER = 1 << 31  # bytes: of larger weights only a part is read and the time scaled up


@dataclass(frozen=True)
class Breakdown:
    """Medians over the steps of a method, in seconds; parts need not add up to a step."""

    num_nodes: float  # of a request, on average
    num_steps: int  # in which all requests took part
    steps_run_by: str
    parts: dict[str, float]  # by PARTS
    step_seconds: float
    weight_bytes: int  # that the base model's part of a step reads
    floor_seconds: float  # to read that many bytes once
    kernels: dict[str, float] = field(default_factory=dict)  # means over steps on CUDA


def break_down(
    engines: Mapping[str, Engine],
    batch: Sequence[list[int]],
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
) -> dict[str, Breakdown]:
    """A breakdown of one-node steps (of the first engine) and of every engine's with heads.

    `batch`: token ids of prompts that are decoded together. A method whose answers have one token
    has no steps and is left out.
    """
    first = next(iter(engines.values()))
    floor = read_floor(_weight_bytes(first), first.base.device)
    cases = {ONE_NODE: (first, False)}
    cases |= {name: (e, True) for name, e in engines.items() if e.heads is not None}
    result = {}
    for name, (engine, drafts) in cases.items():
        breakdown = step_breakdown(
            engine, batch, max_new_tokens, sampling or SamplingParams(), drafts, floor
        )
        if breakdown is not None:
            result[name] = breakdown
    return result


def step_breakdown(
    engine: Engine,
    batch: Sequence[list[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    drafts: bool,
    floor_seconds: float,
) -> Breakdown | None:
    """Steps of this engine, with its heads (`drafts`) or of one node."""
    room = engine.base.info.context_length - max(map(len, batch))
    drafter = engine.drafter_for(
        "medusa" if drafts else "none", batch_size=len(batch), sampling=sampling
    )

    def steps() -> Iterator[StepTiming]:
        tokens = min(max_new_tokens, room)
        requests = [make_request(engine.verifier, prompt, sampling, tokens) for prompt in batch]
        last: StepTiming | None = None
        for _ in engine.scheduler.run(requests, drafter):
            timing = requests[0].timing
            if timing is not None and timing is not last and timing.num_requests == len(requests):
                yield timing
            last = timing

    timings = list(steps())
    if not timings:
        return None
    kernels: dict[str, float] = {}
    if engine.base.device.type == "cuda":
        kernels = _profiled(steps())
    return Breakdown(
        num_nodes=statistics.mean(timing.num_nodes for timing in timings) / len(batch),
        num_steps=len(timings),
        steps_run_by=engine.steps_run_by,
        parts={name: statistics.median(getattr(step, name) for step in timings) for name in PARTS},
        step_seconds=statistics.median(timing.seconds for timing in timings),
        weight_bytes=_weight_bytes(engine),
        floor_seconds=floor_seconds,
        kernels=kernels,
    )


def _profiled(steps: Iterator[Any]) -> dict[str, float]:
    """`kernel_seconds` of these steps except the first, which includes the prompt."""
    next(steps, None)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        num_steps = len(list(steps))
    return kernel_seconds(profiled.key_averages(), num_steps) if num_steps else {}


def kernel_seconds(events: Iterable[Any], num_steps: int) -> dict[str, float]:
    """Seconds a step of each kind of kernel. `events`: a profiler's sums, in microseconds."""
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        name = event.key.lower()
        kind = next((k for k, words in KERNELS.items() if any(w in name for w in words)), OTHER)
        spent[kind] += event.self_device_time_total / 1e6 / num_steps
    return {kind: seconds for kind, seconds in spent.items() if seconds > 0}


def read_floor(num_bytes: int, device: torch.device, repeats: int = 9) -> float:
    """Median seconds to read this many bytes from memory and sum them."""
    held = torch.ones(max(1, min(num_bytes, FLOOR_BUFFER) // 4), dtype=torch.float32, device=device)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        held.sum().item()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * num_bytes / (4 * held.numel())


def _weight_bytes(engine: Engine) -> int:
    """The bytes of the base's weights that a step reads: packed for C++, else of linear layers."""
    if isinstance(engine.verifier, NativeVerifier):
        return engine.verifier.native.weight_bytes
    return stored_bytes([layer.weight for layer in _linear_layers(engine.base.own_model)])


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]
