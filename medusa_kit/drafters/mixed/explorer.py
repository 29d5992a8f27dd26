"""Whether asking a source gains, learned from the steps in which it was asked.

One rule for every source and for none: what has gained most so far is chosen, and what loses is
tried now and then, so often that all tries together cost a small share of the tokens.
"""

from collections.abc import Hashable, Sequence

from medusa_kit.infer.decode.node_choice.mean import Mean
from medusa_kit.locks import SharedLock

TRIES = 0.005  # tokens a step that tries of what loses may cost
RUN = 4  # steps of a try: what a source reads has left the caches at the first of them


class Explorer:
    """Choices by number; choice 0 asks nobody and gains nothing."""

    def __init__(self, hopes: Sequence[float]) -> None:
        """`hopes`: tokens a step that choice 1 and the following ones are assumed to gain, which
        counts as much as one try."""
        self._gains = [Mean(gain, RUN) for gain in (0.0, *hopes)]
        self._unused = [0] * len(self._gains)  # steps since each choice was made
        self._tried, self._left = 0, 0  # the try under way, and its steps to come
        self._lock = SharedLock()

    def choose(self) -> int:
        with self._lock:
            if self._left:
                return self._tried
            best = max(range(len(self._gains)), key=lambda choice: self._gains[choice].value)
            for choice, gain in enumerate(self._gains):
                lost = RUN * (self._gains[best].value - gain.value)
                if choice != best and TRIES * self._unused[choice] > lost:
                    self._tried, self._left = choice, RUN
                    gain.forget()
                    return choice
            return best

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
    """The seconds that steps take beyond what the base model does in them, by kind of step."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, Mean] = {}
        self._lock = SharedLock()

    def record(self, kind: Hashable, seconds: float, plain: float) -> None:
        """`plain`: seconds of a plain step, by which one step counts as longer than usual at most:
        the first one warms up, and a machine has hiccups."""
        with self._lock:
            usual = self._seconds.setdefault(kind, Mean(0.0, RUN - 1))
            usual.record(min(seconds, usual.value + plain))

    def more(self, kind: Hashable, other: Hashable) -> float:
        """By how much one kind of step takes longer than another. Of one that was never seen it is
        nothing."""
        with self._lock:
            return self._usual(kind) - self._usual(other)

    def _usual(self, kind: Hashable) -> float:
        return self._seconds[kind].value if kind in self._seconds else 0.0
