"""Trees that are grown anew at each step, from the probabilities that the heads give.

A static tree spends its nodes where draft tokens are right on average, a dynamic one where they are
likely to be right now (EAGLE-2, arXiv 2406.16858, §4). A path is worth the product of its tokens'
probabilities, with each head calibrated by a temperature and, as an option, blended with what
followed the same tokens earlier in the text (drafters/heads/copying.py). The tree of N nodes is the
root and the N - 1 most probable paths. A path is never more probable than its parent, so these form
a tree, and with nodes numbered by falling probability every smaller tree is the beginning of a
larger one.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from medusa_kit.errors import TreeError

NUM_RANKS, BEAM = 32, 8
MAX_LENGTHS = 8  # of matches that are told apart
MAX_SCALE = 1e9  # of a temperature or a number of smoothing


@dataclass(frozen=True)
class DynamicTree:
    """How trees are grown.

    num_nodes     nodes of each tree, root included, from 2
    temperatures  of each head used, above 0, at most 1e9; their number is the greatest depth
    num_ranks     draft tokens of each head that are considered
    beam          nodes of one depth that get children where heads read the path, since heads then
                  run again for each node; kinds that run in one pass need no such limit
    smoothing     how little earlier occurrences of the last 1, 2, .. tokens count beside the heads,
                  above 0, at most 1e9, eight of them; none: the text is not copied from

    Raises TreeError when one of them is out of range.
    """

    num_nodes: int
    temperatures: tuple[float, ...]
    num_ranks: int = NUM_RANKS
    beam: int = BEAM
    smoothing: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, minimum in (("num_nodes", 2), ("num_ranks", 1), ("beam", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < minimum:
                raise TreeError(
                    f"{name} of a dynamic tree is {value!r}, expected a whole number >= {minimum}"
                )
        found = self.temperatures
        if not isinstance(found, list | tuple) or not found or not all(map(_is_scale, found)):
            raise TreeError(
                f"temperatures of a dynamic tree are {found!r}, expected one number above 0 for "
                f"each head, at most {MAX_SCALE:,.0f}"
            )
        object.__setattr__(self, "temperatures", tuple(float(t) for t in found))
        found = self.smoothing
        listed = isinstance(found, list | tuple) and len(found) <= MAX_LENGTHS
        if not listed or not all(map(_is_scale, found)):
            raise TreeError(
                f"smoothing of a dynamic tree is {found!r}, expected at most {MAX_LENGTHS} numbers "
                f"above 0, each at most {MAX_SCALE:,.0f}"
            )
        object.__setattr__(self, "smoothing", tuple(map(float, found)))

    @classmethod
    def from_dict(cls, fields: Any) -> "DynamicTree":
        """A tree from the fields of `as_dict`. Raises TreeError for anything else."""
        names = set(cls.__dataclass_fields__)
        if isinstance(fields, dict) and "smoothing" not in fields:
            # Older files call it doubts; still older ones have neither.
            known = {name: value for name, value in fields.items() if name != "doubts"}
            fields = {**known, "smoothing": fields.get("doubts", ())}
        if not isinstance(fields, dict) or set(fields) != names:
            found = sorted(fields) if isinstance(fields, dict) else fields
            raise TreeError(f"a dynamic tree has the fields {sorted(names)}, found {found!r}")
        return cls(**fields)

    def as_dict(self) -> dict[str, Any]:
        lists = {"temperatures": list(self.temperatures), "smoothing": list(self.smoothing)}
        return {**asdict(self), **lists}

    @property
    def depth(self) -> int:
        """The length of the longest possible path, which is the number of heads used."""
        return min(len(self.temperatures), self.num_nodes - 1)

    def check_fits(self, num_heads: int, num_ranks: int) -> None:
        """Raise TreeError when it uses more heads, or more draft tokens of a head, than there
        are."""
        if len(self.temperatures) > num_heads:
            raise TreeError(
                f"the dynamic tree has {len(self.temperatures)} temperatures, expected at most "
                f"{num_heads}, one per head",
                hint="run `medusa-kit tree-search` for these heads",
            )
        if self.num_ranks > num_ranks:
            raise TreeError(
                f"the dynamic tree looks at {self.num_ranks} draft tokens of a head, expected "
                f"at most {num_ranks}",
                hint="run `medusa-kit tree-search` for these heads",
            )


Guesses = Sequence[tuple[int, float]]  # tokens with their log-probabilities, likeliest first
# A tree that was grown: its tokens, their parents, and the log-probabilities of the paths to them.
Grown = tuple[list[int], list[int], list[float]]


def best_first(
    root: int,
    guesses_after: Callable[[Sequence[int]], Guesses],
    depth: int,
    num_nodes: int,
    least: float = -math.inf,
) -> Grown:
    """The tree of the num_nodes - 1 most probable paths of up to `depth` tokens.

    `guesses_after(path)`: of the path from the root on. After the root, nodes are ordered by
    falling probability, ties by depth, parent and rank, each rising. Fewer are returned when there
    are no more paths with a log-probability of at least `least` and above minus infinity.
    """
    tokens, parents, scores = [root], [-1], [0.0]
    paths, children = list[list[int]](), list[Guesses]()  # of each node
    # (cost of the path, depth, parent, rank, cost of the parent); cost: minus log-probability.
    heap = list[tuple[float, int, int, int, float]]()

    def ask(node: int, path: list[int], cost: float) -> None:
        guesses = guesses_after(path) if len(path) <= depth else ()
        guesses = [one for one in guesses if one[1] > -math.inf]  # nor NaN
        paths.append(path)
        children.append(guesses)
        if guesses:
            below = cost + max(-guesses[0][1], 0.0)
            heapq.heappush(heap, (below, len(path), node, 0, cost))

    ask(0, [root], 0.0)
    while heap and len(tokens) < num_nodes:
        cost, at, parent, rank, above = heapq.heappop(heap)
        if -cost < least:
            break
        token = children[parent][rank][0]
        tokens.append(token)
        parents.append(parent)
        scores.append(-cost)
        if rank + 1 < len(children[parent]):
            sibling = max(above - children[parent][rank + 1][1], cost)
            heapq.heappush(heap, (sibling, at, parent, rank + 1, above))
        ask(len(tokens) - 1, [*paths[parent], token], cost)
    return tokens, parents, scores


def _is_scale(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= MAX_SCALE
