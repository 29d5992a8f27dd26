"""What steps with heads are worth, measured: whole steps with them against whole plain ones.

All requests of an engine share it, so that a new one starts where the last has ended. It changes
how fast an answer comes, never its text.
"""

from dataclasses import dataclass, field

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.infer.node_choice.cost import StepCost
from medusa_kit.locks import SharedLock

SMOOTHING = 0.03  # share of the newest step in what heads are worth
MIN_WORTH = -0.02  # plain steps gained a step, below which heads rest
HOPELESS = -0.2  # the same, below which they rest at once
RUN = 8  # steps with heads before a rest: behind plain steps the first ones take longer
SHORTEST_REST, LONGEST_REST = 8, 64  # steps
FIRST_PLAIN = 6  # plain steps at first, by which the others are judged
PLAIN, BETWEEN = 4, 256  # so many plain steps after so many with heads: the machine's speed changes
NEWEST = 0.3  # share of the newest plain step in what one takes
OUTLIER = 2.0  # a plain step counts for at most this many times the usual one, others for one more
DEAR, AT_FIRST = 0.6, -0.3  # a guess must have such a chance to pay: heads are worth this at first


class Worth:
    """Of steps of about so many rows. `dear`: whether guesses hardly pay there."""

    def __init__(self, dear: bool) -> None:
        self._worth = AT_FIRST if dear else 0.0
        self._plain: float | None = None  # seconds
        self._untimed = 0  # steps since a plain one was timed
        self._run = 0  # steps with heads since the last rest
        self._next_rest = LONGEST_REST if dear else SHORTEST_REST
        self._lock = SharedLock()

    def plain_steps_due(self) -> int:
        """How many plain steps are to be taken now, to time them."""
        with self._lock:
            if self._plain is None:
                return FIRST_PLAIN
            return PLAIN if self._untimed >= BETWEEN else 0

    def took_plain(self, seconds: float) -> None:
        with self._lock:
            known = self._plain or seconds
            self._plain = known + NEWEST * (min(seconds, OUTLIER * known) - known)
            self._untimed = 0

    def took_with_heads(self, more_tokens: float, seconds: float) -> int:
        """Count a step that gave so many more tokens than a plain one, in plain steps' tokens;
        returns for how many steps heads are to rest."""
        with self._lock:
            self._untimed += 1
            self._run += 1
            if self._run == 1:  # what it reads has left the caches
                return 0
            plain = self._plain or seconds
            gained = more_tokens - (min(seconds, (1 + OUTLIER) * plain) / plain - 1)
            self._worth += SMOOTHING * (gained - self._worth)
            if self._worth >= MIN_WORTH:
                self._next_rest = SHORTEST_REST
                return 0
            if self._run < RUN and self._worth > HOPELESS:
                return 0
            rest, self._run = self._next_rest, 0
            self._next_rest = min(2 * rest, LONGEST_REST)
            return rest


@dataclass
class HeadsWorth:
    """What all requests of an engine have seen of heads: how often guesses of a kind were right,
    and what steps with heads were worth, by about how many rows they had."""

    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    _by_rows: dict[int, Worth] = field(default_factory=dict)
    _lock: SharedLock = field(default_factory=SharedLock, repr=False, compare=False)

    def of_steps(self, num_rows: int, cost: StepCost) -> Worth:
        about = num_rows.bit_length()
        with self._lock:
            if about not in self._by_rows:
                self._by_rows[about] = Worth(dear=cost.least_chance(num_rows) >= DEAR)
            return self._by_rows[about]
