"""Answers that end in a loop: one span of tokens over and over, which any drafter copies for
nothing. Speeds are not measured on it.
"""

from collections.abc import Sequence

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
