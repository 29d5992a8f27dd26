"""Where greedy answers of another arithmetic leave float32's.

It reads float32's own answer, token by token. Its greedy answer leaves float32's exactly where the
first token that it would choose there differs: until then both have the same text.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from medusa_kit.bench.agreement import first_difference

Z = 1.96  # 95 %
NEAR = (0.01, 0.1, 0.5)  # margins between logits, up to which shares are told


def wilson(found: int, tried: int) -> tuple[float, float]:
    """(low, high) of a share."""
    share, square = found / tried, Z * Z / tried
    middle = share + square / 2
    apart = Z * math.sqrt(share * (1 - share) / tried + square / tried / 4)
    return max(middle - apart, 0.0) / (1 + square), (middle + apart) / (1 + square)


def percent(found: int, tried: int, digits: int) -> str:
    """With its bounds, which take each for independent of the others."""
    low, high = (f"{100 * share:.{digits}f}" for share in wilson(found, tried))
    return f"{100 * found / tried:.{digits}f} ({low} to {high})"


def shares_near(margins: Sequence[float]) -> list[str]:
    """The percentage of margins up to each of NEAR."""
    return [f"{100 * sum(one <= most for one in margins) / max(len(margins), 1):.1f}"
            for most in NEAR]  # fmt: skip


@dataclass
class Changed:
    """What one arithmetic did on all answers so far."""

    answers: int = 0
    tokens: int = 0
    differ: int = 0  # tokens, of whole answers
    places: list[int] = field(default_factory=list)  # of first differences, from 0
    margins: list[float] = field(default_factory=list)  # float32's, there

    def add(
        self, chosen: Sequence[int], exact: Sequence[int], margins: Sequence[float],
        answer: Sequence[int],
    ) -> None:  # fmt: skip
        """One answer: what this arithmetic chose at each of its tokens, and float32, which may have
        been read up to the last token that matters alone, with its margins."""
        self.answers, self.tokens = self.answers + 1, self.tokens + len(answer)
        self.differ += sum(one != other for one, other in zip(chosen, answer, strict=True))
        own = first_difference(exact, answer)  # behind it the text is not float32's any more
        until = exact[: own + 1]
        if (place := first_difference(chosen, until)) < len(until):
            self.places.append(place)
            self.margins.append(margins[place])

    def row(self) -> list[str]:
        """Cells under COLUMNS."""
        found = len(self.places)
        tokens = percent(self.differ, self.tokens, 3)
        answers = [str(self.answers), str(found), percent(found, self.answers, 1)]
        if not found:
            return [tokens, *answers, *["–"] * (3 + len(NEAR))]
        return [tokens, *answers, f"{statistics.median(self.places) + 1:.0f}",
                f"{statistics.median(self.margins):.4f}", f"{max(self.margins):.4f}",
                *shares_near(self.margins)]  # fmt: skip


NEAR_COLUMNS = [f"up to {most:g}, %" for most in NEAR]
COLUMNS = ["tokens that differ, %", "answers", "differ", "%", "first at token", "margin there",
           "most", *NEAR_COLUMNS]  # fmt: skip
