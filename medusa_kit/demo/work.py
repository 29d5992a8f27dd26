"""The demo's work: the same amount on every machine, and when a busy machine has to stop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medusa_kit.settings.engine import EMBEDDED_NAME

Clock = Callable[[], float]
ASSETS = Path(__file__).parents[1] / "assets"
# Shares of the time limit at which a part begins nothing more. `heads`: training and the search for
# a tree are cut short. Hidden states take longer than answers, so answers end early.
LIMITS = {"shipped": 0.22, "answers": 0.36, "training": 0.78, "heads": 0.90, "own": 0.96}


@dataclass(frozen=True)
class Work:
    """How much is done.

    `questions`: how many of the `measured_prompts` are measured with; `prompts` are trained on.
    """

    model: str = EMBEDDED_NAME
    heads: str = "auto"
    measured_prompts: Path = ASSETS / "verify_prompts.jsonl"
    questions: int = 10
    new_tokens: int = 96
    prompts: Path = ASSETS / "demo_prompts.jsonl"
    answers: int = 96
    held_out: int = 16  # answers that the tree is found on
    updates: int = 120
    evaluations: int = 6  # points of the curve after the first
    seconds: float = 14 * 60.0


class Deadline:
    """The time limit, which runs from when this is made."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self.clock, self.seconds = clock, seconds
        self._began = clock()

    @property
    def spent(self) -> float:
        return self.clock() - self._began

    def remaining(self, part: str) -> float:
        """Seconds until this part of LIMITS has to end; below 0 afterwards."""
        return LIMITS[part] * self.seconds - self.spent


class OutOfTime(KeyboardInterrupt):
    """Raised where work is cut short, which is written to stand Ctrl-C anywhere."""
