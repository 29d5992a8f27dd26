"""Drafts from scores that are NaN: they are never right, which would go on without a word."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class NoNumbers:
    """Whether a drafter had such scores, for its notes. `called`: the drafter, in the note."""

    called: str
    seen: bool = False

    def none_for(self, chances: Sequence[float]) -> list[float]:
        """These chances, those that are NaN as none: of numbers that overflowed, for example."""
        self.seen = self.seen or any(map(math.isnan, chances))
        return [0.0 if math.isnan(chance) else chance for chance in chances]

    @property
    def notes(self) -> list[str]:
        if not self.seen:
            return []
        return [
            f"{self.called}: its scores were NaN or infinite, so its draft tokens are never right; "
            "its weights are damaged, or the dtype is too narrow: copy them again, or load the "
            "base in a wider dtype"
        ]
