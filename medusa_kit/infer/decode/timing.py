"""The one clock of decoding: where the seconds of a step go.

What is measured are steps that requests take, so `tree-search`, `bench --breakdown` and the choice
of nodes see what users run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]  # seconds, as time.perf_counter


@dataclass(frozen=True)
class StepTiming:
    """Seconds of one step, by what they were spent on.

    drafting  drafters propose, and the nodes are chosen that pay
    forward   the base model scores the nodes, until the host has read the result
    accept    the accepted path of each request is found, and stays in the KV cache
    rest      drafters learn, by what is known before it, and tokens are emitted
    num_nodes     nodes verified, and tokens read in front of them
    num_requests  requests that took part
    """

    drafting: float
    forward: float
    accept: float
    rest: float
    num_nodes: int
    num_requests: int

    @property
    def seconds(self) -> float:
        return self.drafting + self.verifying + self.rest

    @property
    def verifying(self) -> float:
        """Seconds that the number of nodes decides, and by which it is chosen."""
        return self.forward + self.accept


class Laps:
    """Seconds from one call to the next."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock, self._last = clock, clock()

    def lap(self) -> float:
        now = self._clock()
        seconds, self._last = now - self._last, now
        return seconds
