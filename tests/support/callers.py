"""Several Python threads that call the product at once, and what they ask for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

from support.small_engines import random_prompt

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
            "max_new_tokens": 20,
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
