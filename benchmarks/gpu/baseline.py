"""Plain transformers: what an answer takes without this kit, each of the ways that it offers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.known_text import PROMPT, answer_length, check_text, rule_name, some_prompts
from benchmarks.gpu.runner import Part
from benchmarks.gpu.workbench import Workbench
from medusa_kit.bench.gpu.shapes import Shape
from medusa_kit.bench.oracle import Oracle

# A cache of fixed size lets transformers compile the forward. cuDNN's attention has a plan for each
# length, and which kernel of torch's own comes first differs between versions.
STATIC: dict[str, Any] = {"cache_implementation": "static"}
BASELINES: dict[str, tuple[dict[str, Any], bool | None]] = {
    "plain": ({}, None),
    "static cache, compiled": (STATIC, None),
    "without cuDNN": ({}, False),
    "with cuDNN": ({}, True),
}
ROUNDS = 2


def answer(shape: Shape, how: str, temperature: float, bench: Workbench) -> dict[str, Any]:
    """transformers' own generate on an unchanged model."""
    oracle, (options, cudnn) = Oracle(bench.untouched(shape)), BASELINES[how]
    prompts, tokens = some_prompts(bench, shape, bench.size(PROMPT, 12)), answer_length(bench)
    answers: list[list[int]] = []

    def once() -> None:
        answers.extend(
            oracle.generate_batch(prompts, tokens, temperature=temperature, **options)[0]
        )

    try:
        with _cudnn(cudnn):
            _, first = bench.clock.once(once)
            seconds = bench.clock.each(once, bench.size(ROUNDS, 1), 1).median
    finally:
        torch.compiler.reset()  # its graphs keep memory
    if temperature == 0:
        check_text(bench, shape, prompts[0], answers[-1])
    return {"tokens": tokens, "tokens_per_second": tokens / seconds, "first_seconds": first}


@contextmanager
def _cudnn(wanted: bool | None) -> Iterator[None]:
    """None: as torch has it."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    if wanted is not None:
        torch.backends.cuda.enable_cudnn_sdp(wanted)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def baseline_part(shape: Shape, how: str, temperature: float = 0.0) -> Part:
    needs = 100.0 if "compiled" in how else 20.0
    run = partial(answer, shape, how, temperature)
    return Part(baseline_name(shape, temperature, how), "answers", run, needs, shape.name)


def baseline_name(shape: Shape, temperature: float, how: str = "plain") -> str:
    more = "" if how == "plain" else f", {how}"
    return f"{shape.name}: transformers generate, {rule_name(temperature)}{more}"
