"""How far answers in a rounded precision of activations are those that float32 gives."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Agreement:
    """Sums over answers. What follows a first difference is an answer to another text, so tokens
    are counted up to it. A difference is no failure."""

    answers: int = 0
    same: int = 0  # of the answers
    tokens: int = 0  # of the answers
    same_tokens: int = 0  # up to the first difference of each

    def add(self, num_tokens: int, first_difference: int | None) -> None:
        """An answer of so many tokens; None where float32 gives the same one."""
        self.answers += 1
        self.same += first_difference is None
        self.tokens += num_tokens
        self.same_tokens += num_tokens if first_difference is None else first_difference

    def compare(self, answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
        for answer, expected_answer in zip(answers, expected, strict=True):
            same = list(answer) == list(expected_answer)
            self.add(len(answer), None if same else first_difference(answer, expected_answer))

    @property
    def share(self) -> float:
        return self.same_tokens / self.tokens if self.tokens else 1.0

    def describe(self, by: str) -> str:
        """In a line. `by`: what answers in float32."""
        return (
            f"agreement with float32: {self.same} of {self.answers} answers are those of {by}; "
            f"{self.same_tokens:,} of {self.tokens:,} tokens ({self.share:.2%}) come before a "
            "first difference"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


def first_difference(actual: Sequence[int], expected: Sequence[int]) -> int:
    """The first position at which two lists differ; the shorter one's length if it is a prefix."""
    for position, (a, b) in enumerate(zip(actual, expected, strict=False)):
        if a != b:
            return position
    return min(len(actual), len(expected))
