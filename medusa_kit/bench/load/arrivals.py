"""When requests are sent: as soon as one of N clients is free, or as they arrive by chance."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

Q = TypeVar("Q")
R = TypeVar("R")
Ask = Callable[[Q, float], R]  # a question and when it was due -> what became of it


@dataclass(frozen=True)
class Closed:
    """`concurrency` clients, each of which sends its next request when its last one has ended."""

    concurrency: int
    what: ClassVar = "concurrency"

    @property
    def value(self) -> float:
        return self.concurrency

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "closed"}

    def run(self, questions: Sequence[Q], ask: "Ask[Q, R]", start: float) -> list[R]:
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(lambda question: ask(question, time.perf_counter()), questions))


@dataclass(frozen=True)
class Poisson:
    """Requests arrive at random, `rate` a second on average, whether or not others have ended."""

    rate: float
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter
    wait: Callable[[float], None] = time.sleep
    what: ClassVar = "rate"

    @property
    def value(self) -> float:
        return self.rate

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "poisson", "seed": self.seed}

    def times(self, count: int) -> list[float]:
        """Seconds from the start; the same for the same seed, rate and count."""
        generator = random.Random(self.seed)
        return list(accumulate(generator.expovariate(self.rate) for _ in range(count)))

    def run(self, questions: Sequence[Q], ask: "Ask[Q, R]", start: float) -> list[R]:
        """A request is due when it arrives: one that is sent late has waited."""
        with ThreadPoolExecutor(max(1, len(questions))) as pool:
            futures = []
            for question, after in zip(questions, self.times(len(questions)), strict=True):
                if (early := start + after - self.clock()) > 0:
                    self.wait(early)
                futures.append(pool.submit(ask, question, start + after))
            return [future.result() for future in futures]


Load = Closed | Poisson
