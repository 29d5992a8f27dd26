"""Where a decoding step's time goes, compared with the time to read the weights once.

The real loop decodes real prompts with stopwatches around its parts. Their time is exclusive: a
part does not include the parts that it calls. The same answers are decoded once more without
stopwatches, to show their cost. On CUDA a stopwatch waits for the device, which prevents overlap.

A captured forward (infer/cuda_graph/) is one part, since the host does nothing between its kernels.
On CUDA torch's profiler gives the time of each kernel (`kernels`).

Shapes: D in, O out.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from medusa_kit.base.quantization import stored_bytes
from medusa_kit.bench.methods import ONE_NODE
from medusa_kit.drafters import draft_with
from medusa_kit.drafters.heads import dynamic
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.cpu.mkl_linear import pack_for_rows
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.cuda_graph.captured import CapturedForward
from medusa_kit.infer.cuda_graph.verifier import CapturedVerifier
from medusa_kit.infer.decode import decode
from medusa_kit.infer.draft import Drafter
from medusa_kit.infer.group import Group
from medusa_kit.infer.request import Row, make_row
from medusa_kit.infer.tree_cache import TreeCache, TreeCacheLayer
from medusa_kit.settings.sampling import SamplingParams

# In the order of a step. "C++ step" and "captured forward" include all of the model and the prefix
# layer of heads.
HEADS, TREE, NATIVE, CAPTURED, LINEAR, ATTENTION, MODEL, ACCEPT, CACHE, PYTHON = PARTS = (
    "heads", "tree", "C++ step", "captured forward", "linear layers", "attention",
    "rest of the model", "accept", "cache", "Python",
)  # fmt: skip
WHOLE = (HEADS, CAPTURED)  # parts that include whatever they call
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

    num_nodes: int
    num_steps: int
    steps_run_by: str
    parts: dict[str, float]  # those of PARTS that took any time
    step_seconds: float  # with stopwatches
    undisturbed_seconds: float  # without
    weight_bytes: int  # that the base model's part of a step reads
    floor_seconds: float  # to read that many bytes once
    kernels: dict[str, float] = field(default_factory=dict)  # means over steps on CUDA

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
        found = step_breakdown(
            engine, batch, max_new_tokens, sampling or SamplingParams(), drafts, floor
        )
        if found is not None:
            result[name] = found
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

    def rows() -> list[Row]:
        room = engine.base.info.context_length - max(map(len, batch))
        tokens = min(max_new_tokens, room)
        return [make_row(engine.verifier, prompt, sampling, tokens) for prompt in batch]

    drafter = _drafter(engine, len(batch), drafts)
    asked = rows()
    undisturbed = [seconds for seconds, _ in _steps(engine, drafter, asked, None)]
    watch = Stopwatch(engine.base.device)
    with watched(engine, drafter, watch):
        steps = list(_steps(engine, drafter, rows(), watch))
    if not steps:
        return None
    kernels: dict[str, float] = {}
    if engine.base.device.type == "cuda":
        kernels = _profiled(_steps(engine, drafter, rows(), None))
    medians = {part: statistics.median(spent[part] for _, spent in steps) for part in PARTS}
    return Breakdown(
        num_nodes=drafter.num_nodes,
        num_steps=len(steps),
        steps_run_by=asked[0].steps_run_by,
        parts={part: seconds for part, seconds in medians.items() if seconds > 0},
        step_seconds=statistics.median(seconds for seconds, _ in steps),
        undisturbed_seconds=statistics.median(undisturbed),
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
    held = torch.ones(max(1, min(num_bytes, FLOOR_BUFFER) // 4), device=device)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        held.sum().item()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * num_bytes / (4 * held.numel())


class Stopwatch:
    """Seconds spent in each part, without the parts that it called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: list[str] = []
        self._since = 0.0
        self.spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._count()
        self._running.append(name)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not set(WHOLE).isdisjoint(self._running):  # heads may read the base's own layers
                return function(*args, **kwargs)
            with self.part(part):
                return function(*args, **kwargs)

        return wrapper

    def _count(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._running:
            self.spent[self._running[-1]] += now - self._since
        self._since = now


@contextmanager
def watched(engine: Engine, drafter: Drafter, watch: Stopwatch) -> Iterator[None]:
    """A context with stopwatches around the parts of a step."""
    verifier = engine.verifier
    places: list[tuple[Any, str, str]] = [
        (drafter, "propose", TREE),
        (dynamic, "scored_guesses", HEADS),
        (dynamic, "scored_guesses_after", HEADS),
        (verifier.base, "hidden_and_logits", MODEL),
        (verifier.attention, "attend", ATTENTION),
        (TreeCacheLayer, "update", CACHE),
        (TreeCache, "commit", CACHE),
        (Group, "accept", ACCEPT),
        (CapturedVerifier, "_forward_of", CAPTURED),  # finds it, or captures it; no wait in there
        (CapturedForward, "replay", CAPTURED),
    ]
    if engine.heads is not None:
        places += [(engine.heads, name, HEADS) for name in ("candidates", "candidates_after")]
        if engine.heads.guesser is not None:
            places += [(engine.heads.guesser, name, HEADS) for name in ("fill", "grow")]
    if isinstance(verifier, NativeVerifier):
        places.append((verifier.native, "score", NATIVE))
    places += [(layer, "forward", LINEAR) for layer in _linear_layers(verifier.base.model)]
    with ExitStack() as stack:
        for owner, name, part in places:
            stack.enter_context(_replaced(owner, name, watch.timed(getattr(owner, name), part)))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _steps(
    engine: Engine, drafter: Drafter, rows: list[Row], watch: Stopwatch | None
) -> Iterator[tuple[float, dict[str, float]]]:
    """Seconds of each step in which all rows took part, in all and by part."""
    emitted = decode(engine.verifier, drafter, rows)
    next(emitted)  # the prompt's
    watch = watch or Stopwatch(engine.base.device)
    while all(row.finish_reason is None for row in rows):
        watch.spent.clear()
        start = time.perf_counter()
        with watch.part(PYTHON):
            next(emitted)
        seconds = time.perf_counter() - start
        yield seconds, defaultdict(float, watch.spent)


def _drafter(engine: Engine, batch_size: int, drafts: bool) -> Drafter:
    if not drafts:
        return PlainDrafter(engine.base.device)
    assert engine.heads is not None
    tree = engine.tree_for(batch_size)
    pack_for_rows(engine.base, tree.num_nodes * batch_size)  # as the engine does
    return draft_with(engine.heads, tree)


def _weight_bytes(engine: Engine) -> int:
    """The bytes of the base's weights that a step reads: packed for C++, else of linear layers."""
    if isinstance(engine.verifier, NativeVerifier):
        return engine.verifier.native.weight_bytes
    return stored_bytes([layer.weight for layer in _linear_layers(engine.base.model)])


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]
