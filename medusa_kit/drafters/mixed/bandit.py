"""Learns which sources to ask at a position, from the tokens and seconds of earlier steps.

Asking heads or a draft model takes time whatever the result, so it has to pay. Positions are
grouped by how many tokens the free guesses promise. In each such situation every choice has its
tokens and seconds; the one with the most tokens a second is taken, and the others are tried now and
then, less often the worse they did. Where it is known beforehand what a choice should come to
(heads whose tree was calibrated), one that should lose is not tried before that costs little.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from medusa_kit.locks import SharedLock

EDGES = (1.1, 1.3, 1.6, 2.2, 3.2)  # promised tokens a step between two situations
FADING = 0.98  # decay of a step's weight with each later one of its kind
TRIALS = 3.0  # steps that the optimistic first estimate counts for
SHORTEST_WAIT, LONGEST_WAIT = 24, 384  # steps of a situation between two tries of a loser
KNOWN = 8.0  # steps that an expectation from calibration counts for
TRIAL_SHARE = 0.005  # of the time of steps, at most, for the first try of what should lose
STALE = 8  # steps without a try that fade a record as much as a step with one


Expectation = tuple[float, float]  # tokens, seconds


@dataclass
class _Record:
    """Faded sums of one choice in one situation."""

    tokens: float
    seconds: float
    weight: float = TRIALS  # number of steps in the sums
    wait: int = SHORTEST_WAIT
    last_try: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class _Situation:
    records: list[_Record]
    steps: int = 0


@dataclass
class Chooser:
    """Choices by number; 0 asks no source.

    `hopes[c]`: the tokens a step that choice c is assumed to add where nothing else is guessed; it
    adds less where free guesses promise more.
    """

    hopes: Sequence[float]
    _situations: dict[int, _Situation] = field(default_factory=dict)
    _lock: SharedLock = field(default_factory=SharedLock, repr=False, compare=False)

    def choose(
        self,
        promised: float,
        step_seconds: float,
        expected: Callable[[int], Expectation | None] = lambda choice: None,
    ) -> tuple[int, int]:
        """(situation, choice). `promised`: tokens from free guesses in `step_seconds`.

        `expected`: of a choice, (tokens, seconds) of a step with it, where that is known; asked in
        situations that are new.
        """
        with self._lock:
            return self._choose(promised, step_seconds, expected)

    def _first(
        self,
        promised: float,
        step_seconds: float,
        expected: Callable[[int], Expectation | None],
    ) -> list[_Record]:
        """The records of a new situation: what is known of each choice, else what is hoped for."""
        records = [_Record(TRIALS * promised, TRIALS * step_seconds)]
        for choice, hope in enumerate(self.hopes[1:], start=1):
            if (known := expected(choice)) is None:
                tokens = promised + hope / promised**2
                records.append(_Record(TRIALS * tokens, TRIALS * step_seconds))
            else:
                tokens, seconds = known
                records.append(_Record(KNOWN * tokens, KNOWN * seconds, KNOWN))
        best = max(record.rate for record in records)
        for record in records:
            wait = int((1 - record.rate / best) / TRIAL_SHARE)
            record.wait = min(max(wait, SHORTEST_WAIT), LONGEST_WAIT)
        return records

    def _choose(
        self,
        promised: float,
        step_seconds: float,
        expected: Callable[[int], Expectation | None],
    ) -> tuple[int, int]:
        number = bisect_right(EDGES, promised)
        if number not in self._situations:
            self._situations[number] = _Situation(self._first(promised, step_seconds, expected))
        situation = self._situations[number]
        records = situation.records
        best = max(range(len(records)), key=lambda choice: records[choice].rate)
        for choice, record in enumerate(records):
            if choice != best and situation.steps - record.last_try >= record.wait:
                return number, choice
        return number, best

    def record(self, situation: int, choice: int, tokens: float, seconds: float) -> None:
        """Count the tokens and the seconds of a step with this choice."""
        with self._lock:
            self._record(situation, choice, tokens, seconds)

    def _record(self, situation: int, choice: int, tokens: float, seconds: float) -> None:
        where = self._situations[situation]
        record = where.records[choice]
        where.steps += 1
        seconds = min(seconds, 3 * record.seconds / record.weight)  # a machine hiccup
        fading = FADING ** (1 + (where.steps - record.last_try) / STALE)
        record.tokens = fading * record.tokens + tokens
        record.seconds = fading * record.seconds + seconds
        record.weight = fading * record.weight + 1
        record.last_try = where.steps
        loses = record.rate < max(other.rate for other in where.records)
        record.wait = min(2 * record.wait, LONGEST_WAIT) if loses else SHORTEST_WAIT
