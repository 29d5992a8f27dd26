"""Drafters that return their draft tokens as trees on the host, which can be merged with those of
others: copies of text, tables, models, and heads beside them."""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.drafter import Drafter, State, StepResult
from medusa_kit.infer.forest import Forest
from medusa_kit.tree.draft_tree import DraftTree


def num_right(chain: Sequence[int], tree: ScoredTree) -> int:
    """How many tokens of a drafted chain were accepted, whichever draft they became part of."""
    right = 0
    for token, node in zip(chain, tree.path, strict=False):
        if tree.tokens[node] != token:
            break
        right += 1
    return right


def weighed(tree: DraftTree, acceptance: AcceptanceEstimate) -> DraftTree:
    """The same, each draft token with its kind's chance so far."""
    kinds = zip(tree.keys, tree.chances, strict=True)
    tree.chances = [acceptance.chance(key, chance) for key, chance in kinds]
    return tree


def learn(acceptance: AcceptanceEstimate, trees: Sequence[DraftTree], step: StepResult) -> None:
    """Count each draft token as tried if its parent was reached, and as right if it was
    accepted."""
    for tree, path in zip(trees, step.paths, strict=True):
        reached = {0, *path}
        for node in range(1, tree.num_nodes):
            if tree.parents[node] in reached:
                acceptance.record(tree.keys[node], node in reached)


class TreeDrafter(Drafter):
    """A drafter that can also return its draft tokens as trees, to be merged with those of others.
    The drafts that it observes may be another's."""

    num_nodes = 1
    runs_model = (
        False  # whether its draft tokens take time that they must gain, as those of a model
    )
    is_foreseen = False  # whether `expected` is what each of its drafts has

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._min_chance = 0.0  # chance of a path, below which it is not drafted

    def set_min_chance(
        self, min_chance: float, acceptance: AcceptanceEstimate, next_chance: float = 0.0
    ) -> None:
        """From now on paths with a lower chance need not be drafted, as they would not pay; beside
        another draft token of the request, paths below `next_chance`."""
        self._min_chance = min(min_chance, 1.0)

    def expected(self, acceptance: AcceptanceEstimate) -> Sequence[float] | None:
        """How likely its draft tokens are, each with all of its path, before it is asked; None:
        nobody knows."""
        return None

    @abstractmethod
    def guess(self, state: State) -> list[DraftTree]:
        """One tree for each request, made anew: who asks may add to it."""

    def propose(self, state: State) -> Forest:
        return Forest.of_drafts(self.guess(state), self.device)
