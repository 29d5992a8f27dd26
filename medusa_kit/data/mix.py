"""Rows of several sources, read one source after the other or drawn by weight.

The source of each row depends on the seed and the weights alone, so the same recipe trains on the
same rows in the same order.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from medusa_kit.data.readers import BadRow, Row, read_good_and_bad
from medusa_kit.settings.recipe import DataSection, SourceSection

Stop = Literal["exhaust", "stop_at_first"]


def recipe_rows(data: DataSection, seed: int) -> Iterator[Row | BadRow]:
    """The rows that a recipe trains on, read lazily.

    Raises what read_good_and_bad raises.
    """
    entries = data.entries()
    sources = [_rows(entry, data) for entry in entries]
    by_weight = any(entry.weight != 1 for entry in entries)
    if len(entries) > 1 and (by_weight or data.limit is not None or data.mix == "stop_at_first"):
        weighted = [(rows, entry.weight) for rows, entry in zip(sources, entries, strict=True)]
        return mix_rows(weighted, seed, data.limit, data.mix)
    return itertools.chain.from_iterable(sources)


def check_sources(data: DataSection) -> None:
    """Look for the first row of every source, before anything large is loaded.

    Raises what read_good_and_bad raises.
    """
    for entry in {entry.source: entry for entry in data.entries()}.values():
        next(_rows(entry, data), None)


def _rows(entry: SourceSection, data: DataSection) -> Iterator[Row | BadRow]:
    """Rows of one source, at most the limit of all together, so that a stream always has one."""
    limits = [limit for limit in (entry.limit, data.limit) if limit is not None]
    return read_good_and_bad(entry.source, min(limits, default=None), data.streaming, extras=True)


def mix_rows(
    sources: Sequence[tuple[Iterable[Row | BadRow], float]],
    seed: int,
    limit: int | None = None,
    stop: Stop = "exhaust",
) -> Iterator[Row | BadRow]:
    """Rows of (source, weight > 0) pairs, each source in its own order, at most `limit` in all.

    Every row comes from a source drawn with a probability proportional to its weight. A drawn
    source without further rows is dropped while the others go on in their proportions ("exhaust":
    every row is given once), or it ends the mix ("stop_at_first": the proportions hold to the end).
    """
    mixed = _draw([(iter(rows), weight) for rows, weight in sources], random.Random(seed), stop)
    return itertools.islice(mixed, limit)


def _draw(
    sources: list[tuple[Iterator[Row | BadRow], float]], generator: random.Random, stop: Stop
) -> Iterator[Row | BadRow]:
    while sources:
        chosen = _choose([weight for _, weight in sources], generator)
        row = next(sources[chosen][0], None)
        if row is not None:
            yield row
        elif stop == "stop_at_first":
            return
        else:
            del sources[chosen]


def _choose(weights: Sequence[float], generator: random.Random) -> int:
    """An index, drawn by weight through `random()`: the only method whose numbers Python keeps
    the same between versions."""
    point = generator.random() * sum(weights)
    for index, up_to in enumerate(itertools.accumulate(weights)):
        if point < up_to:
            return index
    return len(weights) - 1  # by rounding the point may equal the sum
