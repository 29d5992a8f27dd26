"""What all requests of an engine have measured of `auto`'s choices, and what it began with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.mixed.asking import Asking
from medusa_kit.drafters.mixed.chooser import Chooser
from medusa_kit.infer.node_choice.cost import StepCost
from medusa_kit.locks import SharedLock

MIN_LEFT, FIRST_REST = 0.15, 8  # below this share of hopes, a rest is so long from the start


@dataclass
class Experience:
    """The measurements of all requests of an engine. `hopes`: see Chooser."""

    acceptance: AcceptanceEstimate
    cost: StepCost
    hopes: Sequence[float]
    # By number of the choice: how often its guesses and all of their path were right when its tree
    # was calibrated, likeliest first.
    calibrated: Mapping[int, Sequence[float]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # choices made at least once, which warms up
    _choosers: dict[int, Chooser] = field(default_factory=dict)
    _asking: dict[int, Asking] = field(default_factory=dict)
    _lock: SharedLock = field(default_factory=SharedLock, repr=False, compare=False)

    def chooser(self, num_rows: int, cost: StepCost) -> Chooser:
        """The one for steps of about so many rows: what pays for one does not pay for many."""
        about = num_rows.bit_length()
        with self._lock:
            if about not in self._choosers:
                left = _left_of_hopes(num_rows, cost)
                self._choosers[about] = Chooser([left * hope for hope in self.hopes])
            return self._choosers[about]

    def new_text(self) -> None:
        """A row joins, whose text is another."""
        with self._lock:
            choosers = list(self._choosers.values())
        for chooser in choosers:
            chooser.new_text()

    def asking(self, num_rows: int, cost: StepCost) -> Asking:
        """The same of whether to ask at all."""
        about = num_rows.bit_length()
        with self._lock:
            if about not in self._asking:
                seldom = _left_of_hopes(num_rows, cost) < MIN_LEFT
                self._asking[about] = Asking(FIRST_REST if seldom else 0)
            return self._asking[about]


def _left_of_hopes(num_rows: int, cost: StepCost) -> float:
    """The share of what guesses bring that is left, beside so many rows, after their nodes have
    been paid for: if all chances of guesses are equally frequent, and the others are dropped."""
    return (1 - min(cost.least_chance(num_rows), 1.0)) ** 2
