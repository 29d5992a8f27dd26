"""Learns which sources to ask at a position, from the tokens and seconds of earlier steps.

Asking heads or a draft model takes time whatever the result, so it has to pay. Positions are
grouped by how many tokens the free guesses promise. In each such situation every choice has its
tokens and seconds; the one with the most tokens a second is taken, and the others are tried now and
then for some steps in a row, less often the worse they did. Where it is known beforehand what a
choice should come to (heads whose tree was calibrated), one that should lose is not tried before
that costs little.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from medusa_kit.locks import SharedLock

EDGES = (1.1, 1.3, 1.6, 2.2, 3.2)  # promised tokens a step between two situations
FADING = 0.98  # decay of a step's weight with each later one of its kind
TRIALS = 3.0  # steps that the optimistic first estimate counts for
SHORTEST_WAIT, LONGEST_WAIT = 24, 384  # steps of a situation between two tries of a loser
RUN = 4  # steps of a try; the first is not counted, since what it reads has left the caches
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

    def fade(self, share: float) -> None:
        self.tokens, self.seconds, self.weight = (
            share * one for one in (self.tokens, self.seconds, self.weight)
        )


@dataclass
class _Situation:
    records: list[_Record]
    steps: int = 0
    tried: int = 0  # the choice of the try that is under way, if any
    left: int = 0  # steps of it


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
            wait = int(RUN * (1 - record.rate / best) / TRIAL_SHARE)
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
        if situation.left:
            return number, situation.tried
        records = situation.records
        best = max(range(len(records)), key=lambda choice: records[choice].rate)
        for choice, record in enumerate(records):
            if choice != best and situation.steps - record.last_try >= record.wait:
                situation.tried, situation.left = choice, RUN
                return number, choice
        return number, best

    def is_trying(self, situation: int) -> bool:
        """Whether a try is under way there, which is not to be interrupted."""
        with self._lock:
            return self._situations[situation].left > 0

    def rested(self) -> None:
        """A step in which nobody was asked, as where free guesses promise nothing: it brings the
        next try nearer."""
        with self._lock:
            if 0 in self._situations:
                self._situations[0].steps += 1

    def record(self, situation: int, choice: int, tokens: float, seconds: float) -> None:
        """Count the tokens and the seconds of a step with this choice."""
        with self._lock:
            self._record(situation, choice, tokens, seconds)

    def _record(self, situation: int, choice: int, tokens: float, seconds: float) -> None:
        where = self._situations[situation]
        record = where.records[choice]
        where.steps += 1
        of_try = where.left > 0 and choice == where.tried
        where.left -= of_try
        seconds = min(seconds, 3 * record.seconds / record.weight)  # a machine hiccup
        record.fade(FADING ** (1 + (where.steps - record.last_try) / STALE))
        record.last_try = where.steps
        if of_try and where.left == RUN - 1:
            return
        record.tokens += tokens
        record.seconds += seconds
        record.weight += 1
        loses = record.rate < max(other.rate for other in where.records)
        if not loses:
            record.wait = SHORTEST_WAIT
        elif not of_try or where.left == 0:
            record.wait = min(2 * record.wait, LONGEST_WAIT)
