"""Learns which source to ask at a position, from what asking has gained at earlier ones.

Asking heads or a draft model takes time whatever the result, so it has to pay. Positions are
grouped by how many tokens the free guesses promise. In each such situation every source has the
mean of what it gained there; the one with the largest gain is asked, if that is above zero, and
the others are tried now and then for some steps in a row, less often the more they lost. Where it
is known beforehand what a source should gain (heads whose tree was calibrated), one that should
lose is not tried before that costs little.

A gain is the difference between two expectations for one and the same step, with the source's
guesses and without. Tokens of single steps differ by more than a source gains in hundreds of them,
and text and machine change meanwhile.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from medusa_kit.locks import SharedLock

EDGES = (1.1, 1.3, 1.6, 2.2, 3.2)  # promised tokens a step between two situations
FADING = 0.99  # decay of a step's weight with each later one of its kind
TRIALS = 3.0  # steps that the optimistic first estimate counts for
SHORTEST_WAIT, LONGEST_WAIT = 24, 384  # steps of a situation between two tries of a loser
RUN = 4  # steps of a try; the first is not counted, since what it reads has left the caches
KNOWN = 8.0  # steps that an expectation from calibration counts for
OTHER_TEXTS = 10.0  # steps, at most, that what was seen in other texts counts for
TRIAL_SHARE = 0.005  # of the time of steps, at most, for the first try in a text of what loses
STALE = 8  # steps without a try that fade a record as much as a step with one
SMOOTHING = 0.05  # share of the newest in a usual time
LONGER = 2.0  # times the usual one that a time counts for at most: a machine has hiccups


@dataclass
class _Record:
    """What a source has gained in one situation: tokens a step, the mean of so many steps."""

    gain: float
    weight: float
    wait: int = SHORTEST_WAIT
    last_try: int = 0


@dataclass
class _Situation:
    records: list[_Record]  # of choice 1 and the following ones
    steps: int = 0
    tried: int = 0  # the choice of the try that is under way, if any
    left: int = 0  # steps of it

    @property
    def best(self) -> int:
        """The choice that gains most; 0 where none gains."""
        gains = [0.0, *(record.gain for record in self.records)]
        return gains.index(max(gains))


@dataclass
class _Usual:
    """A usual time in seconds; 0 before the first."""

    seconds: float = 0.0

    def add(self, newest: float) -> float:
        """Count it; returns as much of it as counts."""
        self.seconds = self.seconds or newest
        newest = min(newest, LONGER * self.seconds)
        self.seconds += SMOOTHING * (newest - self.seconds)
        return newest


@dataclass
class Chooser:
    """Choices by number; 0 asks no source.

    `hopes[c]`: the tokens a step that choice c is assumed to gain where nothing else is guessed; it
    gains less where free guesses promise more.
    """

    hopes: Sequence[float]
    _between: _Usual = field(default_factory=_Usual)
    _asking: dict[int, _Usual] = field(default_factory=dict)
    _situations: dict[int, _Situation] = field(default_factory=dict)
    _lock: SharedLock = field(default_factory=SharedLock, repr=False, compare=False)

    def choose(
        self, promised: float, expected: Callable[[int], float | None] = lambda choice: None
    ) -> tuple[int, int]:
        """(situation, choice). `promised`: tokens of a step with free guesses alone.

        `expected`: the gain of a choice where that is known; asked in situations that are new.
        """
        with self._lock:
            return self._choose(promised, expected)

    def _first(self, promised: float, expected: Callable[[int], float | None]) -> list[_Record]:
        """The records of a new situation: what is known of each choice, else what is hoped for."""
        records = []
        for choice, hope in enumerate(self.hopes[1:], start=1):
            if (known := expected(choice)) is None:
                records.append(_Record(hope / promised**2, TRIALS))
            else:
                records.append(_Record(known, KNOWN))
        best = max((record.gain for record in records), default=0.0)
        for record in records:
            record.wait = _wait((max(best, 0.0) - record.gain) / promised)
        return records

    def _choose(self, promised: float, expected: Callable[[int], float | None]) -> tuple[int, int]:
        number = bisect_right(EDGES, promised)
        if number not in self._situations:
            self._situations[number] = _Situation(self._first(promised, expected))
        situation = self._situations[number]
        if situation.left:
            return number, situation.tried
        best = situation.best
        for choice, record in enumerate(situation.records, start=1):
            if choice != best and situation.steps - record.last_try >= record.wait:
                situation.tried, situation.left = choice, RUN
                return number, choice
        return number, best

    def pays(self) -> bool:
        """Whether a source pays, or one is being tried, where free guesses promise least."""
        with self._lock:
            least = self._situations.get(0)
            return least is not None and (least.best > 0 or least.left > 0)

    def rested(self) -> None:
        """A step in which nobody was asked, as where free guesses promise nothing: it brings the
        next try nearer."""
        with self._lock:
            if 0 in self._situations:
                self._situations[0].steps += 1

    def new_text(self) -> None:
        """From now on another text is decoded, of which earlier ones say little."""
        with self._lock:
            for situation in self._situations.values():
                for record in situation.records:
                    record.weight = min(record.weight, OTHER_TEXTS)
                    record.wait = min(record.wait, _wait(-record.gain))

    def between(self, seconds: float) -> float:
        """What usually lies between a step and the choice of the next one's source. `seconds`: what
        lay there now, which is counted; 0 where it is not known."""
        with self._lock:
            if seconds > 0:
                self._between.add(seconds)
            return self._between.seconds

    def took(self, choice: int, seconds: float) -> float:
        """Count how long asking took; returns as much of it as counts."""
        with self._lock:
            return self._asking.setdefault(choice, _Usual()).add(seconds)

    def record(self, situation: int, choice: int, gained: float = 0.0) -> None:
        """Count a step with this choice, and what asking gained: tokens, less those of the time
        that it took."""
        with self._lock:
            self._record(situation, choice, gained)

    def _record(self, situation: int, choice: int, gained: float) -> None:
        where = self._situations[situation]
        where.steps += 1
        if choice == 0:
            return
        record = where.records[choice - 1]
        of_try = where.left > 0 and choice == where.tried
        where.left -= of_try
        record.weight *= FADING ** (1 + (where.steps - record.last_try) / STALE)
        record.last_try = where.steps
        if of_try and where.left == RUN - 1:
            return
        record.weight += 1
        record.gain += (gained - record.gain) / record.weight
        if choice == where.best:
            record.wait = SHORTEST_WAIT
        elif not of_try or where.left == 0:
            record.wait = min(2 * record.wait, LONGEST_WAIT)


def _wait(lost: float) -> int:
    """Steps until a source is tried that loses this share of a step's tokens."""
    return min(max(int(RUN * lost / TRIAL_SHARE), SHORTEST_WAIT), LONGEST_WAIT)
