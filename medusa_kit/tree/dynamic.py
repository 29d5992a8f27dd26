"""Trees that are grown anew at each step, from the probabilities that the heads give.

A static tree spends its nodes where guesses are right on average, a dynamic one where they are
likely to be right now (EAGLE-2, arXiv 2406.16858, §4). A path is worth the product of its tokens'
probabilities, with each head calibrated by a temperature. The tree of N nodes is the root and the
N - 1 most probable paths. A path is never more probable than its parent, so these form a tree, and
with nodes numbered by falling probability every smaller tree is the beginning of a larger one.

Shapes: N nodes with root, K heads, R ranks.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from medusa_kit.errors import TreeError

NUM_RANKS, BEAM = 32, 8
UNUSED = -2  # as parent: the slot holds nothing


@dataclass(frozen=True)
class DynamicTree:
    """How trees are grown.

    num_nodes     nodes of each tree, root included, from 2
    temperatures  of each head used, above 0; their number is the greatest depth
    num_ranks     guesses of each head that are considered
    beam          nodes of one depth that get children where heads read the path, since heads then
                  run again for each node; kinds that run in one pass need no such limit

    Raises TreeError when one of them is out of range.
    """

    num_nodes: int
    temperatures: tuple[float, ...]
    num_ranks: int = NUM_RANKS
    beam: int = BEAM

    def __post_init__(self) -> None:
        for name, least in (("num_nodes", 2), ("num_ranks", 1), ("beam", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise TreeError(
                    f"{name} of a dynamic tree is {value!r}, expected a whole number >= {least}"
                )
        found = self.temperatures
        if not isinstance(found, list | tuple) or not found or not all(map(_is_scale, found)):
            raise TreeError(
                f"temperatures of a dynamic tree are {found!r}, expected one number above 0 for "
                "each head"
            )
        object.__setattr__(self, "temperatures", tuple(float(t) for t in found))

    @classmethod
    def from_dict(cls, fields: Any) -> "DynamicTree":
        """From the fields of `as_dict`. Raises TreeError for anything else."""
        names = set(cls.__dataclass_fields__)
        if not isinstance(fields, dict) or set(fields) != names:
            found = sorted(fields) if isinstance(fields, dict) else fields
            raise TreeError(f"a dynamic tree has the fields {sorted(names)}, found {found!r}")
        return cls(**fields)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "temperatures": list(self.temperatures)}

    @property
    def depth(self) -> int:
        """The length of the longest possible path, which is the number of heads used."""
        return min(len(self.temperatures), self.num_nodes - 1)

    def check_fits(self, num_heads: int, num_ranks: int) -> None:
        """Raise TreeError when it uses more heads, or more guesses of a head, than there are."""
        if len(self.temperatures) > num_heads:
            raise TreeError(
                f"the dynamic tree has {len(self.temperatures)} temperatures, expected at most "
                f"{num_heads}, one per head",
                hint="run `medusa-kit tree-search` for these heads",
            )
        if self.num_ranks > num_ranks:
            raise TreeError(
                f"the dynamic tree looks at {self.num_ranks} guesses of a head, expected at most "
                f"{num_ranks}",
                hint="run `medusa-kit tree-search` for these heads",
            )


def best_first(
    scores_KR: Sequence[Sequence[float]], num_nodes: int
) -> tuple[list[int], list[int], list[int]]:
    """The num_nodes - 1 most probable paths where no head reads the path: (parents, depths, ranks).

    scores_KR: log-probabilities of each head's guesses, falling along R. After the root, nodes are
    ordered by falling probability, ties by depth, parent and rank, each rising. Fewer are returned
    when there are no more paths.
    """
    parents, depths, ranks = [-1], [0], [0]
    # (cost of the path, depth, parent, rank, cost of the parent); cost: minus log-probability.
    heap = [(max(-scores_KR[0][0], 0.0), 1, 0, 0, 0.0)]
    while heap and len(parents) < num_nodes:
        cost, depth, parent, rank, above = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        row_R = scores_KR[depth - 1]
        if rank + 1 < len(row_R):
            sibling = max(above - row_R[rank + 1], cost)
            heapq.heappush(heap, (sibling, depth, parent, rank + 1, above))
        if depth < len(scores_KR):
            child = cost + max(-scores_KR[depth][0], 0.0)
            heapq.heappush(heap, (child, depth + 1, node, 0, cost))
    return parents, depths, ranks


def _is_scale(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
