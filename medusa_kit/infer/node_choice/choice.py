"""How many of the guesses a step verifies: those with the most tokens a second over all its rows.

Verifying a guess takes time, t(n) by all nodes of the step, and gives a token if it is right. Where
many rows share a step, or the processor is slow, only sure guesses pay; where none does, the step
is a plain one. Plain Python over chances.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from medusa_kit.infer.node_choice.cost import StepCost

MIN_CHANCE = 0.01  # no guess with less is verified


@dataclass(frozen=True)
class Offer:
    """Guesses that a drafter could have verified.

    `chances[b]`: of row b's guesses, each with all of its path, likeliest first and parents before
    children. `seconds`: what naming any of them takes; `more[n - 1]`: how much longer it takes to
    name a row's first n, where that depends on n. `trial`: a row whose first guess is verified even
    where it does not pay, since its chance has not been looked at for long.
    """

    chances: Sequence[Sequence[float]]
    seconds: float = 0.0
    trial: int | None = None
    more: Sequence[float] = ()


class Choice(NamedTuple):
    """`counts[o][b]`: guesses of offer o's row b to verify, the likeliest ones. `tokens`: expected
    of the step in `seconds`, over all rows."""

    counts: list[list[int]]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def choose_nodes(offers: Sequence[Offer], num_others: int, cost: StepCost) -> Choice:
    """What pays of these offers. `num_others`: nodes of the step in any case, besides the offers'
    own roots, one token each.

    An offer that takes time is made use of only where it pays for that too.
    """
    num_roots = num_others + sum(len(offer.chances) for offer in offers)
    asked = {which for which, offer in enumerate(offers) if not offer.seconds}
    best = _likeliest(offers, asked, num_roots, cost)
    for which, offer in enumerate(offers):
        if offer.seconds:
            other = _likeliest(offers, asked | {which}, num_roots, cost)
            if other.rate > best.rate:
                asked, best = asked | {which}, other
    for counts, offer in zip(best.counts, offers, strict=True):
        if offer.trial is not None:
            counts[offer.trial] = max(counts[offer.trial], 1)
    return best


def chosen_counts(offers: Sequence[Offer], num_others: int, cost: StepCost) -> list[list[int]]:
    """The counts of `choose_nodes`; at once where nothing is offered, as in steps of plain text."""
    if any(any(offer.chances) or offer.trial is not None for offer in offers):
        return choose_nodes(offers, num_others, cost).counts
    return [[0] * len(offer.chances) for offer in offers]


def _likeliest(
    offers: Sequence[Offer], asked: AbstractSet[int], num_roots: int, cost: StepCost
) -> Choice:
    """The number of likeliest guesses of those asked with the most tokens a second."""
    guesses = [
        (-chance, which, row)
        for which, offer in enumerate(offers)
        if which in asked
        for row, chances in enumerate(offer.chances)
        for chance in chances
        if chance >= MIN_CHANCE
    ]
    guesses.sort()
    extra = sum(offers[which].seconds for which in asked)
    counts = [[0] * len(offer.chances) for offer in offers]
    if not guesses:
        return Choice(counts, float(num_roots), cost.seconds(num_roots) + extra)
    times = cost.up_to(num_roots + len(guesses))
    tokens = promised = float(num_roots)
    taken, seconds = 0, times[num_roots] + extra
    tried = [[0] * len(offer.chances) for offer in offers]
    naming = [0.0] * len(offers)  # beyond `extra`
    for count, (negative, which, row) in enumerate(guesses, start=1):
        tokens -= negative
        tried[which][row] += 1
        if more := offers[which].more:
            naming[which] = max(naming[which], more[tried[which][row] - 1])
        longer = times[num_roots + count] + extra + sum(naming)
        if tokens * seconds > promised * longer:
            taken, promised, seconds = count, tokens, longer
    for _, which, row in guesses[:taken]:
        counts[which][row] += 1
    return Choice(counts, promised, seconds)
