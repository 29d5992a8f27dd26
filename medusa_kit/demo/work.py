"""The demo's work: the same amount on every machine, and when a busy machine has to stop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medusa_kit.settings.engine import EMBEDDED_NAME

Clock = Callable[[], float]
ASSETS = Path(__file__).parents[1] / "assets"
# Shares of the time limit at which a part begins nothing more. The rest is for what cannot be cut
# short: loading, hidden states, the search for a tree.
LIMITS = {"shipped": 0.25, "answers": 0.50, "training": 0.72, "tree": 0.85, "own": 0.95}


@dataclass(frozen=True)
class Work:
    """`questions` of the prompts in `asked` are measured with; `prompts` are trained on."""

    model: str = EMBEDDED_NAME
    heads: str = "auto"
    asked: Path = ASSETS / "verify_prompts.jsonl"
    questions: int = 10
    new_tokens: int = 96
    prompts: Path = ASSETS / "demo_prompts.jsonl"
    answers: int = 192
    held_out: int = 24  # answers that the tree is found on
    updates: int = 200
    evaluations: int = 8  # points of the curve after the first
    seconds: float = 14 * 60.0


class Deadline:
    """The time limit, which runs from when this is made."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self.clock, self.seconds = clock, seconds
        self._began = clock()

    @property
    def spent(self) -> float:
        return self.clock() - self._began

    def left(self, part: str) -> float:
        """Seconds until this part of LIMITS has to end; below 0 afterwards."""
        return LIMITS[part] * self.seconds - self.spent
