"""What the device can do at best: its memory's bandwidth, and the matrix products of a model alone.

Shapes: M rows, D in, O out.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.runner import Part
from benchmarks.gpu.workbench import BANDWIDTH, Workbench
from medusa_kit.bench.gpu.shapes import Shape

BUFFER = 1 << 32  # bytes read for the bandwidth, far more than the device's caches hold
IN_TURN = 1 << 28  # bytes of weights read one after another, so that no cache has them
ROWS = (1, 16, 64, 128, 256)
REPEATS = 10


@torch.inference_mode()
def bandwidth(bench: Workbench) -> dict[str, Any]:
    """The highest bandwidth of the device's memory in reading, copying and a product."""
    count = BUFFER // bench.dtype.itemsize
    if bench.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(bench.device)
        count = min(count, free // 3 // bench.dtype.itemsize)
    count = bench.size(count, 1 << 16) // 4096 * 4096
    source = torch.empty(count, device=bench.device, dtype=bench.dtype).normal_()
    target = torch.empty_like(source)
    vector = torch.ones(4096, 1, device=bench.device, dtype=bench.dtype)
    measures: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: target.copy_(source), 2),
        "sum": (lambda: source.view(torch.int32).sum(), 1),
        "maximum": (lambda: source.view(torch.int32).amax(), 1),
        "matrix_times_vector": (lambda: source.view(-1, 4096) @ vector, 1),
    }
    found = {}
    for name, (call, times) in measures.items():
        seconds = bench.clock.each(call, bench.size(20, 2)).median
        found[f"{name}_gb_per_second"] = times * source.nbytes / seconds / 1e9
    return {"gb_per_second": max(found.values()), **found, "buffer_gb": source.nbytes / 1e9}


def products_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """(O, D) of each linear layer as transformers has it, of those fused, and of the logits."""
    D, inner = shape.hidden_size, shape.intermediate_size
    keys = shape.num_key_value_heads * shape.head_dim
    return {
        "q": (D, D), "k": (keys, D), "v": (keys, D), "o": (D, D), "gate": (inner, D),
        "up": (inner, D), "down": (D, inner), "qkv": (D + 2 * keys, D), "gate_up": (2 * inner, D),
        "logits": (shape.vocab_size, D),
    }  # fmt: skip


AS_IS, FUSED = ("q", "k", "v", "o", "gate", "up", "down"), ("qkv", "o", "gate_up", "down")


@torch.inference_mode()
def products(shape: Shape, rows: int, bench: Workbench) -> dict[str, Any]:
    """Microseconds of each, replayed, and of all layers and the logits: what a step is left with
    when nothing else takes time."""
    found: dict[str, Any] = {"rows": rows}
    for name, (out, inner) in products_of(shape).items():
        found[f"{name}_us"] = 1e6 * _product(bench, rows, out, inner)
    floor = bench.floor(shape)
    for way, names in (("as_is", AS_IS), ("fused", FUSED)):
        layer = sum(found[f"{name}_us"] for name in names)
        milliseconds = (shape.num_layers * layer + found["logits_us"]) / 1e3
        found |= {f"{way}_layer_us": layer, f"{way}_ms": milliseconds}
        found[f"{way}_times_floor"] = floor and milliseconds / 1e3 / floor
    return found


def _product(bench: Workbench, rows: int, out: int, inner: int) -> float:
    count = bench.size(max(2, IN_TURN // (2 * out * inner)), 2)
    weights = torch.empty(count, out, inner, device=bench.device, dtype=bench.dtype).normal_()
    states_MD = torch.ones(rows, inner, device=bench.device, dtype=bench.dtype)

    def all_of_them() -> None:
        for weight_OD in weights:
            torch.nn.functional.linear(states_MD, weight_OD)

    timed = bench.clock.replayable(all_of_them)
    return bench.clock.together(timed, bench.size(REPEATS, 1)) / count


def bandwidth_part() -> Part:
    return Part(BANDWIDTH, "bandwidth", bandwidth)


def products_parts(shape: Shape) -> Iterator[Part]:
    for rows in ROWS:
        name = f"{shape.name}: matrix products, {rows} rows"
        yield Part(name, "products", partial(products, shape, rows), 5.0, shape.name)
