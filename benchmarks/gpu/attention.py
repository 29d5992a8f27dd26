"""Tree attention alone: one layer's call of each backend over a long KV cache.

Shapes: B batch, H query heads, G key/value heads, N nodes, S slots, E head dim.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.known_text import tree_of
from benchmarks.gpu.runner import Part
from benchmarks.gpu.workbench import Cannot, Workbench
from medusa_kit.bench.gpu.shapes import Shape
from medusa_kit.infer.attention.backend import AttentionCall, Case
from medusa_kit.infer.attention.choice import BACKENDS
from medusa_kit.infer.attention.step import TreeStep
from medusa_kit.infer.forest import Forest

LENGTHS = (512, 4096, 32768)
NODES, SMALL_LENGTH = 64, 40
REPEATS = 50


@torch.inference_mode()
def attention(shape: Shape, name: str, length: int, bench: Workbench) -> dict[str, Any]:
    """Raises Cannot where the backend cannot run here."""
    backend, length = BACKENDS[name], bench.size(length, SMALL_LENGTH)
    if absent := backend.missing():
        raise Cannot(absent[0])
    tree = Forest.of([[0] * NODES], [tree_of(NODES).parents], bench.device)
    step = TreeStep([length], *tree.padded()[1:])
    G, E, device = shape.num_key_value_heads, shape.head_dim, bench.device
    query = torch.randn(1, NODES, shape.num_attention_heads, E, device=device, dtype=bench.dtype)
    slots = torch.randn(2, 1, G, length + NODES, E, device=device, dtype=bench.dtype)
    call = AttentionCall(query.transpose(1, 2), *slots.unbind(), step, E**-0.5)
    if reason := backend.unsupported(Case.of(call)):
        raise Cannot(reason)
    run = partial(backend.attend, call)
    captured = not backend.reads_lengths
    timed = bench.clock.replayable(run) if captured else run
    seconds = bench.clock.together(timed, bench.size(REPEATS, 2))
    return {
        "nodes": NODES,
        "slots": length,
        "us": 1e6 * seconds,
        "gb_per_second": slots.nbytes / seconds / 1e9,
        "captured": captured,
    }


def attention_parts(shape: Shape) -> Iterator[Part]:
    for length in LENGTHS:
        for name in BACKENDS:
            told = f"{shape.name}: attention {name} over {length:,}"
            yield Part(told, "attention", partial(attention, shape, name, length), 3.0, shape.name)
