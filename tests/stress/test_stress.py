"""Several engines, each in several threads, asked in random order, with streams that are opened,
left idle, taken up again and dropped: every answer is the one that a thread alone gets.

`make test` asks a little, `make stress` the whole: STRESS_REQUESTS says how much of each thread.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.callers import Words, all_at_once, answers, requests_of
from support.small_engines import build_engine, random_heads
from support.tiny_models import tiny_model

import medusa_kit
from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine

pytestmark = pytest.mark.stress

FAMILIES = ("llama-tied", "mistral-sliding", "llama", "gpt2")  # C++ steps, its layers, torch's
THREADS = 4  # for each engine
REQUESTS = int(os.environ.get("STRESS_REQUESTS", "4"))
LONG = REQUESTS >= 100
EMBEDDED_PROMPTS = ("Why is the sky blue?", "Count to ten.", "Name three rivers.", "Say hello.")


def tiny_engine(family: str) -> Engine:
    base = wrap_model(tiny_model(family), Words(), family)
    return build_engine(base, heads=random_heads(base))


def visitor(
    engine: Engine, requests: list[dict[str, Any]], expected: list[list[int]], seed: int
) -> Callable[[], None]:
    """One thread's requests."""
    draw = random.Random(seed)

    def finish(which: int, streaming: Any) -> None:
        list(streaming)
        assert streaming.result.token_ids == expected[which]

    def visit() -> None:
        idle: list[tuple[int, Any]] = []
        for _ in range(REQUESTS):
            which, way = draw.randrange(len(requests)), draw.random()
            if way < 0.5:
                assert engine.generate(**requests[which]).token_ids == expected[which]
                continue
            streaming = engine.stream(**requests[which])
            for _ in range(draw.randrange(4)):
                next(streaming, None)
            so_far = streaming.result.token_ids
            assert so_far == expected[which][: len(so_far)]
            if way < 0.8:
                idle.append((which, streaming))  # else dropped as it is
            if len(idle) > 2:
                finish(*idle.pop(draw.randrange(len(idle))))
        for which, streaming in idle:
            finish(which, streaming)

    return visit


def stress(engines: list[Engine], requests: list[dict[str, Any]]) -> None:
    expected = [answers(engine, requests) for engine in engines]
    visitors = [
        visitor(engine, requests, own, seed)
        for seed in range(THREADS)
        for engine, own in zip(engines, expected, strict=True)
    ]
    all_at_once(lambda number: visitors[number](), len(visitors))


@pytest.mark.slow
@pytest.mark.parametrize("torch_threads", [1, 2])
def test_engines_in_threads(torch_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(torch_threads)
    try:
        stress([tiny_engine(family) for family in FAMILIES], requests_of(16))
    finally:
        torch.set_num_threads(before)


@pytest.mark.embedded
@pytest.mark.skipif(not LONG, reason="the long form only: make stress")
def test_the_embedded_model_in_threads() -> None:
    """Two engines that share nothing, real heads and tree."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    requests = [
        {"prompt": prompt, "drafter": drafter, "max_new_tokens": 16, **sampling}
        for prompt in EMBEDDED_PROMPTS
        for drafter in ("medusa", "auto")
        for sampling in ({}, {"temperature": 0.8, "seed": 3})
    ]
    try:
        stress([medusa_kit.load("smollm2-135m-instruct") for _ in range(2)], requests)
    finally:
        torch.set_num_threads(before)
