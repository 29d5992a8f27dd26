"""One request's draft tokens as a tree, each with the chance that it is right."""

import heapq
from collections.abc import Hashable, Iterable, Sequence

from medusa_kit.tree.shape import ROOT


class DraftTree:
    """Node 0 is the root; siblings hold different tokens; parents come before their children.

    `chances[n]`: the drafter's estimate of how likely the base model chooses node n, given n's
    parent. `keys[n]`: draft tokens of one kind share a key, by which right draft tokens are
    counted.
    """

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.chances = [root], [ROOT], [1.0]
        self.keys: list[Hashable] = [None]
        self._children: dict[tuple[int, int], int] = {}

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    def child(self, parent: int, token: int) -> int | None:
        return self._children.get((parent, token))

    def add(self, parent: int, token: int, chance: float, key: Hashable = None) -> int:
        """The child of `parent` that holds `token`; an existing one keeps the better chance."""
        node = self.child(parent, token)
        if node is None:
            node = self._children[parent, token] = self.num_nodes
            self.tokens.append(token)
            self.parents.append(parent)
            self.chances.append(chance)
            self.keys.append(key)
        elif chance > self.chances[node]:
            self.chances[node], self.keys[node] = chance, key
        return node

    def add_chain(self, tokens: Iterable[int], chance: float, key: Hashable = None) -> int:
        """Add a chain of tokens below the root; returns its last node."""
        node = 0
        for token in tokens:
            node = self.add(node, token, chance, key)
        return node

    def merge(self, other: "DraftTree", nodes: Iterable[int] | None = None) -> None:
        """Add the draft tokens of `other`, which has the same root: all, or those at `nodes`,
        parents before children."""
        node_of = {0: 0}
        for node in range(1, other.num_nodes) if nodes is None else nodes:
            parent = node_of[other.parents[node]]
            node_of[node] = self.add(
                parent, other.tokens[node], other.chances[node], other.keys[node]
            )

    def by_chance(self) -> list[tuple[int, float]]:
        """(node, chance of the whole path to it), the root first, then likeliest first."""
        if self.num_nodes == 1:
            return [(0, 1.0)]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        order, queue = list[tuple[int, float]](), [(-1.0, 0)]
        while queue:
            negative, node = heapq.heappop(queue)
            order.append((node, -negative))
            for child in children.get(node, ()):
                heapq.heappush(queue, (negative * self.chances[child], child))
        return order

    def best_path(self) -> list[tuple[int, float]]:
        """(node, chance of the whole path to it) of the path with the most right draft tokens
        expected, the root first."""
        gains, following = [0.0] * self.num_nodes, [0] * self.num_nodes
        for node in range(self.num_nodes - 1, 0, -1):  # children before their parents
            gain, parent = self.chances[node] * (1.0 + gains[node]), self.parents[node]
            if gain >= gains[parent]:  # of equal ones the first that was drafted
                gains[parent], following[parent] = gain, node
        path, node, chance = [(0, 1.0)], 0, 1.0
        while node := following[node]:
            chance *= self.chances[node]
            path.append((node, chance))
        return path

    def kept(self, nodes: Sequence[int]) -> "DraftTree":
        """Only these nodes, the root first and parents before children. May be the tree itself."""
        if self.num_nodes == 1:
            return self
        result = DraftTree(self.tokens[0])
        result.merge(self, nodes[1:])
        return result
