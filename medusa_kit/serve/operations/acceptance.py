"""Whether served text is drafted as well as the text that heads were measured on.

A step counts by the number of nodes that were verified in it: the search for the tree measured how
often each of its nodes is accepted, so it says what the likeliest of them come to, few or many.
Heads that fall short and drafters of which nothing is accepted are told in a line of the log, once,
and are in /metrics.
"""

from collections import Counter

from medusa_kit import console
from medusa_kit.infer.decode.request import Request
from medusa_kit.tree.plan import TreePlan

HEADS = ("medusa", "auto")  # drafters that use them; the first has no others
STEPS = 1000  # with drafts: then the standard error of the share is about 0.03
FALL = 0.25  # of the draft tokens accepted in the search. Drawing at 0.8 costs 0.1 (LOG.md)
HOTTEST = 0.8  # temperature: of hotter draws fewer drafts are right, whatever the text


class ServedAcceptance:
    """Sums over answers, by drafter. `add` may be called in one thread."""

    def __init__(self, plan: TreePlan | None) -> None:
        planned = () if plan is None else plan.trees
        shares = [list(one.acceptance) for one in planned if one.acceptance is not None]
        # Larger batches have smaller trees, so the least of them is what can be expected of all.
        self.measured: float | None = min((1 + sum(one) for one in shares), default=None)
        largest = max(shares, key=lambda one: len(one), default=[])
        self._shares = sorted(largest, reverse=True)
        self._steps, self._accepted = Counter[str](), Counter[str]()
        self._heads_steps, self._heads_accepted, self._heads_expected = 0, 0, 0.0
        self.share: float | None = None  # of what is expected, in the last STEPS
        self._told_of_fall = False

    @property
    def never_accepted(self) -> list[str]:
        """Drafters of which nothing was accepted in STEPS or more."""
        steps = list(self._steps.items())  # /metrics may ask meanwhile
        return [name for name, n in steps if n >= STEPS and not self._accepted[name]]

    def add(self, drafter: str, heads: str | None, request: Request) -> None:
        """Count an answer. `heads`: that its request named, which were measured elsewhere."""
        known, params = self.never_accepted, request.sampler.params
        comparable = heads is None and drafter in HEADS and bool(self._shares)
        comparable = comparable and params.temperature <= HOTTEST and not params.lossy
        for (sources, num_nodes, depth), steps in request.drafted_steps.items():
            name = sources or drafter
            self._steps[name] += steps
            self._accepted[name] += steps * depth
            if comparable and name == HEADS[0]:
                self._heads_steps += steps
                self._heads_accepted += steps * depth
                self._heads_expected += steps * sum(self._shares[: num_nodes - 1])
        for name in set(self.never_accepted).difference(known):
            console.warn(
                f"no draft token of {name!r} was accepted in {self._steps[name]:,} steps, so it "
                "costs time and gains none; --drafter names another drafter"
            )
        if self._heads_steps >= STEPS:
            self._look_at_heads()

    def _look_at_heads(self) -> None:
        steps, accepted, expected = self._heads_steps, self._heads_accepted, self._heads_expected
        self.share = accepted / expected if expected else None
        if self.share is not None and self.share < 1 - FALL and not self._told_of_fall:
            self._told_of_fall = True
            console.warn(
                f"the heads' acceptance length is {1 + accepted / steps:.2f} on what is served; "
                f"{1 + expected / steps:.2f} is expected of trees as large, by the search for "
                "theirs: this text is of another kind; serve --record FILE and "
                "train --quick --from FILE make heads for it"
            )
        self._heads_steps = self._heads_accepted = 0  # newer text is looked at next
        self._heads_expected = 0.0
