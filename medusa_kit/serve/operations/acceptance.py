"""Whether served text is guessed as well as the text that heads were measured on.

Of what drafters are asked for: heads' acceptance against what the search for their tree found, and
drafters whose guesses are never right. Each is told in a line of the log, once.
"""

from collections import Counter

from medusa_kit import console
from medusa_kit.infer.decode.request import Request
from medusa_kit.tree.plan import TreePlan

HEADS = "heads"  # of both drafters that use them
STEPS = 2000  # then the standard error of an acceptance length is about 0.02
FALL = 0.1  # of the measured acceptance length
DRAFTED = 0.8  # of a tree's nodes a step: else `auto` has mostly not drafted with heads


class ServedAcceptance:
    """Sums over answers, by drafter. `add` may be called in one thread."""

    def __init__(self, plan: TreePlan | None) -> None:
        lengths = [
            (1 + sum(planned.acceptance), planned.tree.num_nodes)
            for planned in (() if plan is None else plan.trees)
            if planned.acceptance is not None
        ]
        # Larger batches have smaller trees, so the least of them is what can be expected of all.
        self._nodes = min((nodes for _, nodes in lengths), default=0)
        self.measured: float | None = min((length for length, _ in lengths), default=None)
        self._steps, self._tokens = Counter[str](), Counter[str]()
        self._told: set[str] = set()

    def add(self, drafter: str, heads: str | None, request: Request) -> None:
        """Count an answer. `heads`: that its request named, which were measured elsewhere."""
        if request.num_nodes <= request.num_steps:  # nothing was drafted
            return
        self._count(drafter, request)
        self._tell_of_none(drafter)
        drafted = request.num_nodes / request.num_steps >= DRAFTED * self._nodes
        if heads is None and drafter in ("medusa", "auto") and self.measured and drafted:
            self._count(HEADS, request)
            self._tell_of_fall(self.measured)

    def _count(self, name: str, request: Request) -> None:
        self._steps[name] += request.num_steps
        self._tokens[name] += len(request.token_ids) - 1

    def _tell_of_none(self, drafter: str) -> None:
        steps = self._steps[drafter]
        if steps >= STEPS and self._tokens[drafter] <= steps:
            self._tell(
                drafter,
                f"none of the tokens that the drafter {drafter!r} guessed in {steps:,} steps was "
                "accepted, so it costs time and gains none; --drafter names another",
            )

    def _tell_of_fall(self, measured: float) -> None:
        if self._steps[HEADS] < STEPS:
            return
        served = self._tokens[HEADS] / self._steps[HEADS]
        if served < (1 - FALL) * measured:
            self._tell(
                HEADS,
                f"the heads' acceptance length is {served:.2f} on what is served, and was "
                f"{measured:.2f} when their tree was searched: this text is of another kind; "
                "serve --record FILE and train --quick --from FILE make heads for it",
            )
        self._steps[HEADS], self._tokens[HEADS] = 0, 0  # newer text is looked at next

    def _tell(self, name: str, what: str) -> None:
        if name not in self._told:
            self._told.add(name)
            console.warn(what)
