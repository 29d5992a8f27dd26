"""Steps against the floor: how long the real loop takes for N nodes after a prompt.

A step is timed from one `next` of the decoding loop to the other, host and device together, as it
counts in an answer. Of captured forwards the device's time is also measured, by replays without a
wait in between.

Shapes: D hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.known_text import NUM_HEADS, KnownText, some_prompts, tree_of
from benchmarks.gpu.runner import Part
from benchmarks.gpu.workbench import CAPTURED, Cannot, StepMode, Workbench
from medusa_kit.bench.gpu.shapes import Shape
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import MedusaKitError
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.infer.device.cache import FixedCache
from medusa_kit.infer.device.captured import CapturedForward
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.dynamic import DynamicTree

PREFIX, LONG_PREFIX = 512, 4000  # tokens before the step
STEPS, WARM_UPS, REPLAYS, SYNC_STEPS = 30, 4, 20, 5
RANKS = 8  # of each head in a dynamic tree
GREEDY = SamplingParams()
TOP_KERNELS, NAME_LENGTH = 15, 90
COMPILE_SECONDS = 90.0


def drafter_of(
    bench: Workbench, engine: Engine, shape: Shape, nodes: int, right_share: float = 0.0
) -> Drafter:
    """A drafter that proposes that many nodes at almost no cost."""
    if nodes == 1:
        return PlainDrafter(bench.device)
    heads = KnownText.of(engine.base, bench.successors(shape), right_share)
    return draft_with(heads, tree_of(nodes))


def step(
    shape: Shape, mode: StepMode, nodes: int, prefix: int, rows: int, bench: Workbench
) -> dict[str, Any]:
    """Steps of the real decoding loop with only wrong guesses, so that each emits one token."""
    engine = bench.engine(shape, mode)
    drafter = drafter_of(bench, engine, shape, nodes)
    return timed_steps(bench, engine, shape, drafter, bench.size(prefix, 12), rows)


def sampled_step(shape: Shape, nodes: int, bench: Workbench) -> dict[str, Any]:
    """The same with tokens drawn at temperature 0.7, with random heads."""
    engine = bench.engine(shape, CAPTURED)
    drafter = draft_with(random_heads(engine), tree_of(nodes))
    sampling = SamplingParams(temperature=0.7, seed=1)
    return timed_steps(bench, engine, shape, drafter, bench.size(PREFIX, 12), sampling=sampling)


def dynamic_step(shape: Shape, nodes: int, bench: Workbench) -> dict[str, Any]:
    """The same with a tree that is grown anew at each step, with random heads."""
    engine = bench.engine(shape, CAPTURED)
    tree = DynamicTree(nodes, (1.0,) * NUM_HEADS, RANKS, RANKS)
    drafter = draft_with(random_heads(engine), tree)
    return timed_steps(bench, engine, shape, drafter, bench.size(PREFIX, 12))


def random_heads(engine: Engine, kind: str = "medusa") -> MedusaHeads:
    heads = MedusaHeads.for_base(engine.base, NUM_HEADS, kind=kind)  # type: ignore[arg-type]
    heads.requires_grad_(False)
    with torch.inference_mode():
        for parameter in heads.parameters():
            parameter.normal_(std=0.02)
    return heads


def timed_steps(
    bench: Workbench,
    engine: Engine,
    shape: Shape,
    drafter: Drafter,
    prefix: int,
    rows: int = 1,
    sampling: SamplingParams = GREEDY,
) -> dict[str, Any]:
    steps, floor = bench.size(STEPS, 3), bench.floor(shape)
    prompts, room = some_prompts(bench, shape, prefix, rows), WARM_UPS + steps + SYNC_STEPS
    loose = loose_forwards(engine)
    with _decoding(engine, drafter, prompts, room, sampling) as (row, next_step):
        timing = bench.clock.each(next_step, steps, WARM_UPS)
        syncs = bench.clock.syncs(next_step, bench.size(SYNC_STEPS, 1))
        run_by = row.steps_run_by
    if loose_forwards(engine) > loose:
        raise MedusaKitError(f"steps were not captured, but run by {run_by}")
    found: dict[str, Any] = {"nodes": drafter.num_nodes, "rows": rows, "prefix": prefix}
    found |= {"ms": 1e3 * timing.median, "least_ms": 1e3 * timing.least}
    found |= {"times_floor": floor and timing.median / floor}
    if isinstance(engine.verifier, CapturedVerifier):
        seconds = _replayed(bench, engine, drafter, prompts, room)
        found |= {"device_ms": 1e3 * seconds, "device_times_floor": floor and seconds / floor}
    found |= {"floor_ms": floor and 1e3 * floor, "host_syncs": syncs}
    chosen = engine.attention.report()
    return found | {"attention": chosen["used"], "fallbacks": chosen["fallbacks"], "run_by": run_by}


@contextmanager
def _decoding(
    engine: Engine,
    drafter: Drafter,
    prompts: list[list[int]],
    steps: int,
    sampling: SamplingParams = GREEDY,
) -> Iterator[tuple[Request, Callable[[], Any]]]:
    """(the first row, a function that takes the next step), after the prompts were read."""
    rows = _rows(engine, prompts, steps, sampling)
    batch = Batch(engine.verifier, len(rows), reuse_prefixes=False)
    for row in rows:
        batch.add(row, drafter)
    batch.step()  # in this thread, which the profiler follows
    yield rows[0], batch.step


def _rows(
    engine: Engine, prompts: list[list[int]], steps: int, sampling: SamplingParams = GREEDY
) -> list[Request]:
    """Rows with room for `steps` steps, whatever these emit."""
    tokens = 1 + (steps + 1) * 5
    return [make_request(engine.verifier, ids, sampling, tokens) for ids in prompts]


@torch.inference_mode()
def _replayed(
    bench: Workbench, engine: Engine, drafter: Drafter, prompts: list[list[int]], room: int
) -> float:
    """Seconds of a captured forward on the device, with replays queued one after another."""
    batch = Batch(engine.verifier, len(prompts), reuse_prefixes=False)
    for row in _rows(engine, prompts, room):
        batch.add(row, drafter)
    batch.step()  # the prompts
    batch.step()
    captured = forwards_of(batch.cache)[-1]  # dynamic trees may have several
    replay = captured.run if captured.graph is None else captured.graph.replay
    return bench.clock.together(replay, bench.size(REPLAYS, 2))


def forwards_of(cache: TreeCache) -> list[CapturedForward]:
    """Those captured over a cache."""
    assert isinstance(cache, FixedCache)
    return list(cache.forwards.values())


def loose_forwards(engine: Engine) -> int:
    """How many forwards over trees a verifier that captures them has run without."""
    verifier = engine.verifier
    return verifier.num_loose if isinstance(verifier, CapturedVerifier) else 0


def kernels(shape: Shape, mode: StepMode, nodes: int, bench: Workbench) -> dict[str, Any]:
    """The operations of a step on the device by their time, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    engine, steps = bench.engine(shape, mode), bench.size(5, 1)
    drafter, prompts = drafter_of(bench, engine, shape, nodes), some_prompts(bench, shape, 32)
    on_cuda = bench.device.type == "cuda" and not bench.small  # a dry run's device has no kernels
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    with _decoding(engine, drafter, prompts, WARM_UPS + steps) as (_, next_step):
        for _ in range(WARM_UPS):
            next_step()
        with profile(activities=[activity]) as profiled:
            for _ in range(steps):
                next_step()
            bench.clock.wait()
    field = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    events = [(getattr(one, field), one.count, one.key) for one in profiled.key_averages()]
    events = sorted((one for one in events if one[0] > 0), reverse=True)
    if not events:
        raise Cannot("the profiler recorded nothing on the device")
    top = [
        {"name": name[:NAME_LENGTH], "a_step": count / steps, "microseconds": time / steps}
        for time, count, name in events[:TOP_KERNELS]
    ]
    return {
        "nodes": nodes,
        "kernels": sum(count for _, count, _ in events) / steps,
        "ms": sum(time for time, _, _ in events) / steps / 1e3,
        "top": top,
    }


def step_part(
    shape: Shape, nodes: int, mode: StepMode = CAPTURED, prefix: int = PREFIX, rows: int = 1
) -> Part:
    return Part(
        step_name(shape, nodes, mode, prefix, rows),
        "steps",
        partial(step, shape, mode, nodes, prefix, rows),
        COMPILE_SECONDS if mode.compiled else 5.0,
        shape.name,
    )


def step_name(
    shape: Shape, nodes: int, mode: StepMode = CAPTURED, prefix: int = PREFIX, rows: int = 1
) -> str:
    more = f" for {rows} rows" if rows > 1 else ""
    more += f" after {prefix:,}" if prefix != PREFIX else ""
    return f"{shape.name}: step of {nodes}{more} ({mode})"


def sampled_step_part(shape: Shape, nodes: int) -> Part:
    name = f"{shape.name}: sampled step of {nodes}"
    return Part(name, "steps", partial(sampled_step, shape, nodes), 8.0, shape.name)


def dynamic_step_part(shape: Shape, nodes: int) -> Part:
    name = f"{shape.name}: step of a grown tree of {nodes}"
    return Part(name, "steps", partial(dynamic_step, shape, nodes), 8.0, shape.name)


def kernels_part(shape: Shape, nodes: int, mode: StepMode = CAPTURED) -> Part:
    name = f"{shape.name}: kernels of a step of {nodes} ({mode})"
    return Part(name, "kernels", partial(kernels, shape, mode, nodes), 10.0, shape.name)
