"""What became of each request, and the figures of many.

Times are seconds since the measurement began. A request's first token is timed from when it was
due, so that one which had to wait before it could be sent does not look better than it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy

from medusa_kit.distill.openai_stream import Arrived, Streamed

PERCENTILES = (50, 95, 99)
DIGITS = 6  # microseconds


@dataclass
class RequestRecord:
    """One request. `pieces`: when each piece of its text came, with its number of tokens."""

    number: int  # of the prompt, from 1
    arrival: float
    started: float
    ended: float
    first_token: float | None = None  # None: it failed, or the answer came whole
    pieces: list[tuple[float, float]] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int | None = None
    steps: int | None = None
    acceptance_length: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    text: str = ""
    token_ids: list[int] | None = None
    same: bool | None = None  # as plain decoding; None: not compared

    @property
    def answered(self) -> bool:
        return self.error is None

    def waits(self) -> list[float]:
        """The seconds between one piece of text and the next."""
        times = [at for at, _ in self.pieces]
        return [after - before for before, after in pairwise(times)]

    def token_times(self) -> list[float]:
        """For each token after the first piece: the wait for its piece, shared among its tokens."""
        times = []
        for wait, (_, tokens) in zip(self.waits(), self.pieces[1:], strict=True):
            times += [wait / tokens] * max(1, round(tokens)) if tokens else []
        return times

    def as_dict(self) -> dict[str, Any]:
        known = {name: value for name, value in vars(self).items() if name != "token_ids"}
        for name in ("arrival", "started", "ended", "first_token"):
            known[name] = None if known[name] is None else round(known[name], DIGITS)
        known["pieces"] = [(round(at, DIGITS), round(tokens, 3)) for at, tokens in self.pieces]
        return known


def answered(
    number: int, got: Streamed, tokens: int, arrival: float, start: float
) -> RequestRecord:
    """The record of an answer. `start`: when the measurement began, on the clock of `got`."""
    return RequestRecord(
        number,
        arrival - start,
        got.started - start,
        got.ended - start,
        None if got.first is None else got.first - start,
        [] if got.first is None else _sizes(got.pieces, tokens, start),
        tokens,
        got.kit.get("cached_tokens"),
        got.kit.get("steps"),
        got.kit.get("acceptance_length"),
        got.finish_reason,
        text=got.text,
        token_ids=got.token_ids,
    )


def _sizes(pieces: Sequence[Arrived], tokens: int, start: float) -> list[tuple[float, float]]:
    """The time and the number of tokens of each piece. Where the server does not say how many a
    piece has, all have as many."""
    has_ids = any(piece.token_ids for piece in pieces)
    mean = tokens / len(pieces) if pieces else 0.0
    return [(piece.at - start, len(piece.token_ids) if has_ids else mean) for piece in pieces]


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p95 and p99, interpolated between the nearest values; None of no values."""
    if not values:
        return None
    percents = numpy.percentile(values, PERCENTILES)
    return {f"p{at}": float(value) for at, value in zip(PERCENTILES, percents, strict=True)}


def summary(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The figures of all requests of one measurement."""
    good = [record for record in records if record.answered]
    seconds = max((record.ended for record in records), default=0.0)
    tokens = sum(record.tokens for record in good)
    compared = [record.same for record in good if record.same is not None]
    firsts = [one.first_token - one.arrival for one in good if one.first_token is not None]
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    return {
        "requests": len(records),
        "answered": len(good),
        "failed": len(records) - len(good),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "answers_per_second": len(good) / seconds if seconds else 0.0,
        "most_at_once": most_at_once(records),
        "first_token_seconds": percentiles(firsts),
        "token_seconds": percentiles([wait for record in good for wait in record.token_times()]),
        "piece_seconds": percentiles([wait for record in good for wait in record.waits()]),
        "answer_seconds": percentiles([record.ended - record.arrival for record in good]),
        "acceptance_length": _acceptance_length(good),
        "cached_tokens": sum(cached) if cached else None,
        "compared": len(compared),
        "same": sum(compared) if compared else None,
        "differing": [record.number for record in good if record.same is False],
    }


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """Requests that were in progress together. One that ends as another starts is before it."""
    changes = [(record.started, 1) for record in records]
    changes += [(record.ended, -1) for record in records]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def _acceptance_length(records: Sequence[RequestRecord]) -> float | None:
    """The acceptance length over all steps; None where the server does not report it."""
    known = [(record.acceptance_length, record.steps) for record in records
            if record.acceptance_length is not None and record.steps]  # fmt: skip
    steps = sum(steps for _, steps in known)
    return sum(length * steps for length, steps in known) / steps if steps else None
