"""Reading a prompt in chunks of several sizes."""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.known_text import some_prompts
from benchmarks.gpu.runner import Part
from benchmarks.gpu.workbench import CAPTURED, Workbench
from medusa_kit.bench.gpu.shapes import Shape

CHUNKS = (512, 2048, 8192)


@torch.inference_mode()
def prompt(shape: Shape, length: int, chunk: int, bench: Workbench) -> dict[str, Any]:
    """The time to read a prompt, by the verifier that decodes."""
    verifier, length = bench.engine(shape, CAPTURED).verifier, bench.size(length, 24)
    chunk = bench.size(chunk, max(1, chunk // 256))
    cache = verifier.new_cache(1, length)
    (ids,) = some_prompts(bench, shape, length)

    def read() -> None:
        cache.lengths = [0]
        for start in range(0, length, chunk):
            verifier.read_prompts(cache, [0], [ids[start : start + chunk]])

    seconds, floor = bench.clock.each(read, bench.size(5, 1), 2).median, bench.floor(shape)
    return {
        "prompt_tokens": length,
        "chunk": chunk,
        "by_default": verifier.prompt_chunk(1),
        "ms": 1e3 * seconds,
        "tokens_per_second": length / seconds,
        "times_floor": floor and seconds / floor,
        "attention": verifier.attention.name,
    }


def prompt_part(shape: Shape, length: int, chunk: int) -> Part:
    name = f"{shape.name}: prompt of {length:,} tokens, {chunk:,} at a time"
    return Part(name, "prompts", partial(prompt, shape, length, chunk), 5.0, shape.name)
