"""The model's own answers, written in rounds; how many follow is decided anew after each round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.data.readers import AnswerRow, Conversation, read_rows
from medusa_kit.distill.generate import generate_answers
from medusa_kit.errors import DeviceMemoryError
from medusa_kit.quick import settings
from medusa_kit.quick.state import Clock


@dataclass
class Written:
    """What a file holds, and how fast this process wrote its part."""

    asked: int = 0  # prompts, in order
    answers: int = 0
    tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens a second; None before the first round."""
        return self.new_tokens / max(self.seconds, 1e-6) if self.new_tokens else None

    @property
    def length(self) -> float:
        """Tokens of an answer."""
        return self.tokens / self.answers if self.answers else float(settings.ANSWER_TOKENS)


# How many prompts to answer next, from what is written; 0: enough.
More = Callable[[Written], int]


def answer(
    base: BaseModel, prompts: Sequence[Conversation], path: Path, more: More, clock: Clock
) -> Written:
    """Answer prompts in order until `more` says 0 or none is left; goes on with the file."""
    written, batch = _there(path), settings.ANSWER_BATCH
    while written.asked < len(prompts) and (count := more(written)) > 0:
        upto = min(written.asked + count, len(prompts))
        began = clock()
        try:
            report = generate_answers(
                base, prompts[:upto], path, max_new_tokens=settings.ANSWER_TOKENS, batch_size=batch
            )
        except DeviceMemoryError:
            if batch == 1:
                raise
            batch //= 2
            console.note(f"memory is too small for the batch: {batch} prompts together from now on")
            written = _there(path, written)
            continue
        written.seconds += clock() - began
        written.asked = upto
        written.answers += report.written
        written.tokens += report.tokens
        written.new_tokens += report.tokens
    return written


def _there(path: Path, so_far: Written | None = None) -> Written:
    """What the file holds; of `so_far`, what this process wrote."""
    rows = read_answers(path)
    tokens = sum(len(row.response_ids) for row in rows)
    if so_far is None:
        return Written(len(rows), len(rows), tokens)
    return Written(len(rows), len(rows), tokens, so_far.new_tokens, so_far.seconds)


def read_answers(path: Path) -> list[AnswerRow]:
    if not path.is_file() or not path.stat().st_size:
        return []
    return [row for row in read_rows(str(path)) if isinstance(row, AnswerRow)]
