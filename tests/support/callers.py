"""Threads that call the product at once, an engine for them, and what they ask for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from support.small_engines import build_engine, random_heads, random_prompt
from support.tiny_models import tiny_model

DRAFTERS = ("medusa", "auto", "none", "recycling")
T = TypeVar("T")


def all_at_once(work: Callable[[int], T], threads: int) -> list[T]:
    """What work(0), work(1), … return; they start together. An error in one is raised here."""
    start = Barrier(threads)

    def begin(number: int) -> T:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


def answers(engine: Any, requests: list[dict[str, Any]]) -> list[list[int]]:
    return [engine.generate(**request).token_ids for request in requests]


def requests_of(count: int) -> list[dict[str, Any]]:
    """Greedy ones and seeded ones, by several drafters."""
    return [
        {
            "prompt": random_prompt(3 + 5 * (number % 4), number),
            "drafter": DRAFTERS[number % len(DRAFTERS)],
            **({"temperature": 1.0, "seed": number} if number % 3 == 2 else {}),
            "max_new_tokens": 12,
        }
        for number in range(count)
    ]


class Words:
    """A tokenizer that has a word for every token."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f" {token}" for token in ids)

    def convert_tokens_to_ids(self, token: str) -> None:
        return None


def family_for(steps: str) -> str:
    return "llama-tied" if steps == "C++" else "llama"


def engine_for(steps: str, seed: int = 0) -> Engine:
    name = family_for(steps)
    base = wrap_model(tiny_model(name, seed), None, f"{name}-{seed}")
    engine = build_engine(base, heads=random_heads(base))
    assert engine.steps_run_by.startswith(steps), engine.steps_run_by
    return engine
