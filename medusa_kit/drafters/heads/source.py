"""The trees of heads as tries, each guess with its chance, to be merged with others or verified as
far as it pays.

Where the tree is grown anew at each step, the heads say how probable each guess is now, and what
was so probable and so deep before says how often it was right. In a static tree the chance of a
node is how often that node was right so far.
"""

import math
from collections.abc import Sequence
from typing import Any

from medusa_kit.drafters.estimates import DEEPER, FIRST_GUESS, NEXT_RANK
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.trie import Trie
from medusa_kit.heads.guesser import Least
from medusa_kit.infer.draft import State, StepResult

CLASSES = 10  # of probabilities of guesses, each counted by itself
# A path gets children from this many times the chance on that a guess must have: children are less
# likely, and naming them takes time.
ASKED = 3.5
LEAST_CHANCE, HIGHEST = 0.01, 0.9  # between which these chances are


class HeadsSource:
    name = "medusa"

    def __init__(self, inner: Any, calibrated: Sequence[float] | None = None) -> None:
        """`inner`: a drafter; with a static tree if the state holds the heads' guesses.
        `calibrated`: the share of steps that accepted each node below the root, where known."""
        self.inner, self.num_nodes = inner, inner.num_nodes
        self._least = Least()
        self._shares = None if calibrated is None else [1.0, *calibrated]

    def leave_out_below(self, least_chance: float) -> None:
        """Grow no paths with a lower chance from now on, in a dynamic tree, and children only of
        paths so likely that they may have that chance after another pass of the heads."""
        kept, asked = (
            math.log(min(max(chance, LEAST_CHANCE), HIGHEST))
            for chance in (least_chance, ASKED * least_chance)
        )
        self._least = Least(kept, asked)

    def join(self, state: State) -> None:
        self.inner.join(state)

    def guess(self, state: State) -> list[Trie]:
        if isinstance(self.inner, DynamicDrafter):
            return self._grown(self.inner, state)
        if state.guesses is not None:
            parents = self.inner.topology.parents
            return [self._trie(tokens, parents) for tokens in state.guesses]
        draft = self.inner.propose(state)
        return [
            self._trie(tokens, topology.parents)
            for tokens, topology in zip(draft.tokens_BN.tolist(), draft.topologies, strict=True)
        ]

    def _grown(self, inner: DynamicDrafter, state: State) -> list[Trie]:
        grown = inner.grow(state.hidden_BD, state.roots_B, self._least)
        tries = []
        for tokens, parents, scores in zip(
            grown.tokens_BN.tolist(), grown.parents, grown.scores_BN.tolist(), strict=True
        ):
            trie, depths = Trie(tokens[0]), [0]
            for node in range(1, len(parents)):
                if (parent := parents[node]) < 0:
                    break
                depths.append(depths[parent] + 1)
                chance = math.exp(min(scores[node] - scores[parent], 0.0))
                key = (self.name, depths[node], int(CLASSES * min(chance, 0.999)))
                trie.add(parent, tokens[node], chance, key)
            tries.append(trie)
        return tries

    def _trie(self, tokens: Sequence[int], parents: Sequence[int]) -> Trie:
        trie, place, born, depths = Trie(tokens[0]), {0: 0}, dict[int, int](), {0: 0}
        for node, parent in enumerate(parents):
            if parent >= 0:
                rank = born.get(parent, 0)
                born[parent] = rank + 1
                depths[node] = depths[parent] + 1
                chance = self._believed(node, parent, depths[node], rank)
                key = (self.name, node)
                place[node] = trie.add(place[parent], tokens[node], chance, key)
        return trie

    def _believed(self, node: int, parent: int, depth: int, rank: int) -> float:
        """How likely the node is, given its parent, before any step."""
        if self._shares is None:
            return FIRST_GUESS * DEEPER ** (depth - 1) * NEXT_RANK**rank
        above = self._shares[parent]
        return min(self._shares[node] / above, 1.0) if above else 0.0

    def observe(self, step: StepResult) -> None:
        self.inner.observe(step)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.inner.select_rows(rows)
