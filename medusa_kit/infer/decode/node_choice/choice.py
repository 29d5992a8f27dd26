"""How many draft tokens a step verifies: those with the most tokens a second over all its requests.

Verifying a draft token takes time, t(n) by all nodes of the step, and gives a token if it is right.
Where many requests share a step, or the processor is slow, only sure ones gain; where none does,
the step is a plain one. Plain Python over chances.
"""

from collections.abc import Sequence
from typing import NamedTuple

from medusa_kit.infer.decode.node_choice.cost import StepCost

# Of one request's draft tokens, each with all of its path, likeliest first and parents before
# children.
Chances = Sequence[float]


class Choice(NamedTuple):
    """How many draft tokens to verify: `counts[b]` of request b, the likeliest ones. `tokens`:
    expected of the step in `seconds`, over all requests."""

    counts: list[int]
    tokens: float
    seconds: float


def choose_nodes(candidates: Sequence[Chances], num_others: int, cost: StepCost) -> Choice:
    """The number of likeliest draft tokens with the most tokens a second. `num_others`: nodes of
    the step in any case, one token each, besides the roots of these requests."""
    num_roots, counts = num_others + len(candidates), [0] * len(candidates)
    likely = [
        (-chance, request) for request, chances in enumerate(candidates) for chance in chances
    ]
    if not likely:
        return Choice(counts, float(num_roots), cost.seconds(num_roots))
    likely.sort()
    times = cost.up_to(num_roots + len(likely))
    tokens = promised = float(num_roots)
    taken, seconds = 0, times[num_roots]
    for count, (negative, _) in enumerate(likely, start=1):
        tokens -= negative
        longer = times[num_roots + count]
        if tokens * seconds > promised * longer:
            taken, promised, seconds = count, tokens, longer
    for _, request in likely[:taken]:
        counts[request] += 1
    return Choice(counts, promised, seconds)
