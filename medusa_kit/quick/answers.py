"""The model's own answers, written in rounds; how many follow is decided anew after each round."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.base.tokenizer.encoding_digest import ENCODING
from medusa_kit.data.answer_settings import (
    activations_in,
    compared_rows,
    read_settings,
    tell_doubtful,
    write_settings,
)
from medusa_kit.data.chat import encode_prompt
from medusa_kit.data.readers import AnswerRow, Row, read_rows
from medusa_kit.distill.answer_file import whole_lines
from medusa_kit.distill.generate import asked_messages, generate_answers
from medusa_kit.errors import ConfigError, DataError, DeviceMemoryError, IncompatibleBaseError
from medusa_kit.infer.runners.backends import prepare_backends
from medusa_kit.quick import settings
from medusa_kit.quick.state import Clock
from medusa_kit.settings.engine import FLOAT32, INT8

OTHER_ROWS = "remove these rows, name another folder with --output, or add --fresh to start over"


@dataclass
class Written:
    """Counts of what a file of answers holds, and how fast this process wrote its part."""

    num_prompts: int = 0  # that were answered, in order
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


def activations_for(base: BaseModel, path: Path) -> str:
    """The precision of the answers that are trained on: that of the file where there is one, else
    8 bits where a quantised base can be multiplied so on a CPU."""
    if path.is_file():
        return activations_in(read_settings(path) or {})
    if not base.is_light:
        return FLOAT32
    try:
        prepare_backends(base, activations=INT8)
    except (ConfigError, IncompatibleBaseError):  # not with these weights, or not precise enough
        return FLOAT32
    return INT8


def answer(
    base: BaseModel,
    prompts: Sequence[Row],
    path: Path,
    more: More,
    clock: Clock,
    activations: str = FLOAT32,
) -> Written:
    """Answer prompts in order until `more` says 0 or none is left; resumes the file."""
    if path.is_file():
        whole_lines(path)
    written, batch = _written_in(path), settings.ANSWER_BATCH
    usable = _Usable(base, prompts)
    while usable.some_after(written.num_prompts) and (count := more(written)) > 0:
        num_prompts = written.num_prompts + count
        usable_prompts = usable.first(num_prompts)
        began = clock()
        try:
            report = generate_answers(
                base, usable_prompts, path, max_new_tokens=settings.ANSWER_TOKENS,
                batch_size=batch, activations=activations,
            )  # fmt: skip
        except DeviceMemoryError:
            if batch == 1:
                raise
            batch //= 2
            console.note(f"memory is too small for the batch: {batch} prompts together from now on")
            written = _written_in(path, written)
            continue
        written.seconds += clock() - began
        written.num_prompts = len(usable_prompts)
        written.answers += report.written
        written.tokens += report.tokens
        written.new_tokens += report.tokens
    usable.warn_of_refused()
    return written


class _Usable:
    """The prompts that can be answered, checked no further than they are needed."""

    def __init__(self, base: BaseModel, prompts: Sequence[Row]) -> None:
        self._base, self._unchecked = base, iter(prompts)
        self._usable = list[Row]()
        self._refused = list[str]()

    def some_after(self, count: int) -> bool:
        return len(self.first(count + 1)) > count

    def first(self, count: int) -> list[Row]:
        """The first usable prompts, at most `count`. Raises DataError where there is none."""
        while len(self._usable) < count and (row := next(self._unchecked, None)) is not None:
            try:
                self._check(row)
                self._usable.append(row)
            except DataError as error:
                self._refused.append(f"row {row.row}: {error.message}")
        if not self._usable:
            raise DataError(
                f"none of {len(self._refused)} prompts can be answered, {self._refused[0]}",
                hint="give prompts that leave room for an answer, or another model",
            )
        return self._usable[:count]

    def _check(self, row: Row) -> None:
        size = len(prompt_ids_of(self._base.tokenizer, row))
        context = self._base.info.context_length
        if not size:
            raise DataError("it has no token")
        if size > context - settings.ANSWER_TOKENS:
            raise DataError(
                f"it has {size:,} tokens; answers of {settings.ANSWER_TOKENS} in a context of "
                f"{context:,} leave room for {max(0, context - settings.ANSWER_TOKENS):,}"
            )

    def warn_of_refused(self) -> None:
        if self._refused:
            console.warn(f"{len(self._refused)} prompts cannot be answered and are left out "
                         f"({self._refused[0]})")  # fmt: skip


def prompt_ids_of(tokenizer: Any, row: Row) -> list[int]:
    """The tokens that ask what a row asks. Raises DataError where it cannot be asked."""
    if isinstance(row, AnswerRow):
        return list(row.prompt_ids)
    return list(encode_prompt(tokenizer, asked_messages(row.messages, "first")))


def _written_in(path: Path, so_far: Written | None = None) -> Written:
    """Counts of what the file holds; of `so_far`, what this process wrote is kept."""
    rows = read_answers(path)
    tokens = sum(len(row.response_ids) for row in rows)
    if so_far is None:
        return Written(len(rows), len(rows), tokens)
    return Written(len(rows), len(rows), tokens, so_far.new_tokens, so_far.seconds)


def check_answers(base: BaseModel, prompts: Sequence[Row], path: Path) -> None:
    """Raises ConfigError where the file holds answers that were not made as its settings say, or to
    prompts that were tokenized differently. One that does not say how, as older versions left it,
    says so from here on if all are the same."""
    settings = read_settings(path) if path.is_file() else None
    if settings is None:
        return
    tell_doubtful(path, compared_rows(path, settings, OTHER_ROWS))
    if settings.get(ENCODING) == base.encoding:
        return
    if ENCODING in settings or not _answers_are_to(base, prompts, path):
        raise ConfigError(
            f"{path} holds answers to prompts that were tokenized with another tokenizer or chat "
            f"template than {base.info.name} has now",
            hint="name another folder with --output, or add --fresh to start over",
        )
    with contextlib.suppress(OSError):  # a finished run's folder may be read-only
        write_settings(path, {**settings, ENCODING: base.encoding})


def _answers_are_to(base: BaseModel, prompts: Sequence[Row], path: Path) -> bool:
    """Whether each answer is to the tokens of one of the prompts."""
    whole_lines(path)
    unmatched = {tuple(row.prompt_ids) for row in read_answers(path)}
    for prompt in prompts:
        if not unmatched:
            break
        with contextlib.suppress(DataError):  # one that cannot be answered
            unmatched.discard(tuple(prompt_ids_of(base.tokenizer, prompt)))
    return not unmatched


def read_answers(path: Path) -> list[AnswerRow]:
    if not path.is_file() or not path.stat().st_size:
        return []
    return [row for row in read_rows(str(path)) if isinstance(row, AnswerRow)]
