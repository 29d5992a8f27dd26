"""Part b. How long a captured forward of the 8B shape takes, against reading its weights once.

Shapes: T nodes, N outputs and K inputs of a product.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.fused_block.__main__ import Findings
from benchmarks.fused_block.models import (
    random_family,
    random_tokens,
    random_trees,
    verifier_of,
    with_prompts,
)
from benchmarks.gpu.clock import Clock
from medusa_kit.bench.gpu.shapes import LLAMA_8B, random_base
from medusa_kit.infer.attention.triton_backend import launch
from medusa_kit.infer.device.cache import FixedCache
from medusa_kit.infer.device.fused_model import EXACT, FAST
from medusa_kit.infer.device.fused_tiles import MAX_REGISTERS
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.no_gradients import no_gradients

REPLAYS = 50
STEPS = ((512, 1), (512, 16), (512, 64), (4000, 1), (4000, 16), (4000, 64))  # tokens before, nodes
BATCHES = ((8, 1), (8, 8), (32, 1), (32, 8))  # rows, nodes of each
# Block of outputs, block of inputs, warps, stages; nodes of a tile are 64 and 16.
TILES = ((32, 128, 4, 4), (16, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 3), (64, 64, 4, 4),
         (64, 128, 8, 3), (128, 64, 8, 3), (32, 64, 4, 6))  # fmt: skip
TOP = 10
PROMPT = 2048  # tokens


def run(findings: Findings, options: Namespace) -> None:
    tiny = options.dry_run
    device = torch.device("cpu" if tiny else "cuda")
    base = (
        random_family("llama", torch.float32, tiny)
        if tiny
        else random_base(LLAMA_8B, device, torch.bfloat16)
    )
    clock = Clock(device)
    gb_per_second = bandwidth(clock, tiny)
    read = sum(one.nbytes for name, one in base.own_model.named_parameters() if "embed" not in name)
    floor = read / gb_per_second / 1e6
    findings.write("floor", gb_per_second=gb_per_second, weights_gb=read / 1e9, floor_ms=floor)
    steps = ((30, 3),) if tiny else STEPS
    for mode in (FAST, EXACT, None):
        verifier = verifier_of(base, mode)
        for length, nodes in steps:
            findings.measure(
                f"{mode or 'torch'}: {nodes} nodes after {length}",
                lambda v=verifier, n=nodes, x=length: step(v, clock, [x], [n], floor),
            )
        for rows, nodes in () if tiny else BATCHES:
            findings.measure(
                f"{mode or 'torch'}: {rows} rows of {nodes} nodes after 512",
                lambda v=verifier, r=rows, n=nodes: step(v, clock, [512] * r, [n] * r, floor),
            )
        findings.measure(
            f"{mode or 'torch'}: prompt",
            lambda v=verifier: prompt(v, clock, 20 if tiny else PROMPT),
        )
        for nodes in () if tiny or mode is None else (1, 64):
            findings.measure(
                f"{mode}: kernels of {nodes} nodes", lambda v=verifier, n=nodes: kernels(v, n)
            )
    if not tiny:
        for name, size in ((("qkv"), (6144, 4096)), ("o", (4096, 4096)),
                           ("gate_up", (28672, 4096)), ("down", (4096, 14336))):  # fmt: skip
            findings.measure(f"tiles of {name}", lambda s=size: tiles(clock, gb_per_second, *s))


def bandwidth(clock: Clock, tiny: bool) -> float:
    """GB a second in summing numbers."""
    count = 1 << (16 if tiny else 30)
    numbers = torch.zeros(count, dtype=torch.int32, device=clock.device)
    return numbers.nbytes / clock.each(lambda: numbers.sum(), 10).median / 1e9


@no_gradients
def step(
    verifier: CapturedVerifier, clock: Clock, lengths: list[int], counts: list[int], floor: float
) -> dict[str, Any]:
    """Milliseconds of a replay, and of a whole call with what is sent and copied."""
    cache = with_prompts(verifier, lengths, room=80)
    trees, rows = random_trees(verifier.base, counts), range(len(counts))

    def whole() -> Any:
        return verifier.score(cache, trees, rows)

    whole()
    replay = replay_of(verifier, cache, trees, rows)
    repeats = REPLAYS if clock.on_cuda else 1
    median = 1e3 * clock.each(replay, repeats).median
    call = 1e3 * clock.each(whole, repeats).median
    return {"replay_ms": median, "times_floor": median / floor, "call_ms": call,
            "refused": verifier.refused}  # fmt: skip


def replay_of(
    verifier: CapturedVerifier, cache: FixedCache, trees: Forest, rows: Sequence[int]
) -> Callable[[], Any]:
    """The captured forward of these trees; prompts may have left others."""
    captured = cache.forwards[verifier._shape(cache, trees, rows)]
    return captured.run if captured.graph is None else captured.graph.replay


@no_gradients
def prompt(verifier: CapturedVerifier, clock: Clock, length: int) -> dict[str, Any]:
    """Tokens a second of a prompt, once its forwards are captured."""
    tokens, cache = random_tokens(verifier.base, length, 3), verifier.new_cache(1, length + 80)

    def read() -> None:
        cache.forget(0)
        verifier.read_prompts(cache, [0], [tokens])

    seconds = clock.each(read, 5 if clock.on_cuda else 1, 1).median
    return {"ms": 1e3 * seconds, "tokens_per_second": length / seconds}


@no_gradients
def kernels(verifier: CapturedVerifier, nodes: int) -> dict[str, Any]:
    """The kernels of one replay, those that take longest first, in microseconds."""
    cache = with_prompts(verifier, [512], room=80)
    trees = random_trees(verifier.base, [nodes])
    verifier.score(cache, trees, [0])
    replay = replay_of(verifier, cache, trees, [0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    events = [one for one in profile.key_averages() if one.device_time_total > 0]
    events.sort(key=lambda one: -one.device_time_total)
    return {
        "launches": sum(one.count for one in events),
        "busy_us": sum(one.device_time_total for one in events),
        "top": [(one.key[:60], one.count, round(one.device_time_total, 1)) for one in events[:TOP]],
    }


@no_gradients
def tiles(clock: Clock, gb_per_second: float, outputs: int, inputs: int) -> dict[str, Any]:
    """Times the floor of one product by each tile for 1, 16 and 64 rows, and by cuBLAS; in turn
    over so many weights that no cache has them."""
    from medusa_kit.infer.device.fused.product import product_kernel

    copies = max(2, (1 << 29) // (2 * outputs * inputs))
    weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
               for _ in range(copies)]  # fmt: skip
    floor = copies * weights[0].nbytes / gb_per_second / 1e9
    found = dict[str, Any]()
    for count in (1, 16, 64):
        rows_TK = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda")
        out_TN = rows_TK.new_empty(count, outputs)
        calls: dict[str, Callable[[], Any]] = {
            "cuBLAS": lambda x=rows_TK: [torch.nn.functional.linear(x, one) for one in weights]
        }
        for block in (64, 16) if count <= 16 else (64,):
            for tile in TILES:
                calls[f"{block} {tile}"] = lambda x=rows_TK, o=out_TN, b=block, t=tile: [
                    one_product(product_kernel, x, one, o, b, t) for one in weights
                ]
        for name, call in calls.items():
            try:
                replay = clock.replayable(call)
                found[f"{count}: {name}"] = round(clock.each(replay, 5, 1).median / floor, 3)
            except Exception as error:
                found[f"{count}: {name}"] = repr(error)[:80]
    return found


def one_product(
    kernel: Any,
    rows_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_TN: torch.Tensor,
    block: int,
    tile: tuple[int, int, int, int],
) -> None:
    (N, K), T = weight_NK.shape, len(rows_TK)
    block_n, block_k, warps, stages = tile
    launch(kernel, (-(-T // block), -(-N // block_n)), rows_TK, weight_NK, weight_NK, out_TN, T, K,
           N, HAS_BIAS=False, BLOCK_T=block, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
           num_stages=stages, maxnreg=MAX_REGISTERS)  # fmt: skip
