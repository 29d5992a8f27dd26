"""Whether asking a source gains, learned from the steps in which it was asked.

One rule for every source and for none: what has gained most so far is chosen, and what loses is
tried now and then, so often that all tries together cost a small share of the tokens.
"""

from collections.abc import Hashable, Sequence

from medusa_kit.infer.decode.node_choice.mean import PRIOR, Mean
from medusa_kit.locks import SharedLock

TRIES = 0.005  # tokens a step that tries of what loses may cost
LOST = 0.05  # tokens a step that a try is taken to lose at least: a gain is known no better
HICCUP = 0.25  # of a plain step
RUN = 4  # steps of a try: what a source reads has left the caches at the first of them


UNSEEN = Mean(0.0, 0.0), Mean(0.0, 0.0)


class Explorer:
    """Choices by number; choice 0 asks nobody and gains nothing."""

    def __init__(self, prior_gains: Sequence[float], favour: float = 0.0) -> None:
        """`prior_gains`: tokens a step that choice 1 and the following ones are assumed to gain,
        which counts as much as one try. `favour`: tokens a step that they may lose and still be
        asked."""
        self._favour = favour
        self._gains = [Mean(gain, RUN) for gain in (0.0, *prior_gains)]
        self._unused = [0] * len(self._gains)  # steps since each choice was made
        self._tried, self._left = 0, 0  # the try under way, and its steps to come
        self._lock = SharedLock()

    def choose(self) -> int:
        with self._lock:
            if self._left:
                return self._tried
            worths = [gain.value + self._favour for gain in self._gains]
            worths[0] = 0.0
            best = max(range(len(worths)), key=lambda choice: worths[choice])
            for choice, gain in enumerate(self._gains):
                lost = RUN * max(worths[best] - worths[choice], LOST)
                if choice != best and TRIES * self._unused[choice] > lost:
                    self._tried, self._left = choice, RUN
                    gain.forget()
                    return choice
            return best

    def expect(self, choice: int, gain: float) -> None:
        """From what is known this choice gains so much now, whatever was recorded."""
        with self._lock:
            self._gains[choice].value = gain

    def record(self, choice: int, gain: float) -> None:
        """Count a step with this choice. `gain`: tokens of a request that it added, less those of
        the time that it took."""
        with self._lock:
            self._unused = [1 + steps for steps in self._unused]
            self._unused[choice] = 0
            self._left -= self._left > 0 and choice == self._tried
            if choice:
                self._gains[choice].record(gain)

    def new_text(self) -> None:
        """From now on another text is decoded, of which earlier ones say little."""
        with self._lock:
            for gain in self._gains:
                gain.forget()


class Overheads:
    """What steps take beyond the base model's usual seconds for their nodes, by kind of step."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, tuple[Mean, Mean]] = {}
        self._lock = SharedLock()

    def record(self, kind: Hashable, drafting: float, longer: float, plain: float) -> None:
        """Seconds of drafting, and those by which the base model took longer than usual. `plain`:
        of a plain step, by a share of which one step moves what is believed at most: the first one
        warms up, and a machine has hiccups."""
        with self._lock:
            usual = self._kinds.setdefault(kind, (Mean(0.0, 0.0), Mean(0.0, PRIOR)))
            for mean, seconds in zip(usual, (drafting, longer), strict=True):
                most = max(plain * HICCUP, abs(mean.value))
                mean.record(min(max(seconds, mean.value - most), mean.value + most))

    def drafting(self, kind: Hashable) -> float:
        """Seconds; none of a kind that was never seen."""
        return self._usual(kind)[0]

    def more(self, kind: Hashable, other: Hashable) -> float:
        """By how much one kind of step takes longer than another. Of one that was never seen it is
        nothing."""
        return sum(self._usual(kind)) - sum(self._usual(other))

    def _usual(self, kind: Hashable) -> tuple[float, float]:
        with self._lock:
            drafting, longer = self._kinds.get(kind, UNSEEN)
            return drafting.value, longer.value
