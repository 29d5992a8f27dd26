"""Answers that end in a loop: one span of tokens over and over, which any drafter copies for
nothing. Speeds are not measured on it.
"""

from collections.abc import Sequence

MANY = 0.25  # of the answers
LEAST = 24  # tokens that repeat others, so that a row of dots or a table's line is no loop


def loop_start(token_ids: Sequence[int]) -> int | None:
    """How many tokens come before a span repeats itself for the first time, where it stands there
    three times or more, up to the end; None where the answer ends otherwise. A last span that is
    cut off counts; spans that differ in a number, say, are none."""
    tail = list(reversed(token_ids))
    repeated = _common_starts(tail)
    for period in range(1, len(tail) // 3 + 1):
        if repeated[period] >= max(2 * period, LEAST):
            return len(tail) - repeated[period]
    return None


def too_many(loops: int, answers: int) -> str | None:
    """What to say of answers to train on, `loops` of which end in one, where those are many."""
    if loops <= MANY * answers:
        return None
    return (
        f"{loops:,} of {answers:,} answers to train on end in a loop, one span over and over, from "
        "which heads learn little; a model without a chat template continues a prompt instead of "
        "answering it"
    )


def _common_starts(items: Sequence[int]) -> list[int]:
    """For each place how many items from there on are those at the start (the Z function)."""
    lengths, left, right = [len(items)] + [0] * (len(items) - 1), 0, 0
    for place in range(1, len(items)):
        known = min(right - place, lengths[place - left]) if place < right else 0
        while place + known < len(items) and items[known] == items[place + known]:
            known += 1
        lengths[place] = known
        if place + known > right:
            left, right = place, place + known
    return lengths
