"""When sources are asked for guesses: asking takes time too, for which the guesses have to pay.

Beside many rows it takes a larger share of a step than the few guesses bring that are worth
verifying there. Each time that asking does not pay, the next rest is twice as long.
"""

from medusa_kit.locks import SharedLock

SMOOTHING = 0.05  # share of the newest step in what asking has been worth
LEAST, MOST = -0.5, 4.0  # plain steps gained that one step may count for; texts are read once
LONGEST_REST = 32  # steps without asking anybody
# Share of a plain step that asking in vain may cost: where it takes less nobody rests, since a text
# may begin to repeat itself at any step.
AFFORDED = 0.02


class Asking:
    """What asking has been worth lately, in steps of about so many rows. All requests of an engine
    share one, so that a new one starts where the last has ended."""

    def __init__(self, first_rest: int = 0) -> None:
        """`first_rest`: steps without asking after the first time that it does not pay."""
        self._worth = 0.0  # plain steps gained a step
        self._first_rest = self._next_rest = first_rest
        self._lock = SharedLock()

    def record(self, gained: float, found: bool) -> int:
        """Count a step in which sources were asked; returns for how many steps nobody is to be.

        `gained`: by its guesses, after what they and asking took, in plain steps. `found`: whether
        any guess was worth verifying.
        """
        with self._lock:
            gained = max(LEAST, min(gained, MOST))
            self._worth += SMOOTHING * (gained - self._worth)
            if found and self._worth >= 0:
                self._next_rest = 0
                return 0
            rest = self._next_rest
            self._next_rest = min(max(1, 2 * rest), LONGEST_REST)
            return min(rest, max(int(-self._worth / AFFORDED), self._first_rest))
