"""The texts of the self-check: prompts of random tokens, and trees on them in turn.

Each tree follows what was kept of the one before, so that commit is checked too. For the last one,
a kernel that spreads long rows over several programs has to do so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from medusa_kit.tree.shape import path_to

PROMPT_LENGTHS = (5, 11)
PARENTS = (-1, 0, 0, 1, 2, 2)
KEPT = (0, 2, 5)
SMALLER = (-1, 0, 0, 1)  # the second row's last tree: rows may differ in size
CHAIN, SHORT_CHAIN = (-1, 0, 1, 2, 3, 4), (-1, 0, 1)
Shape = tuple[Sequence[int], Sequence[int]]  # parents of a tree, and the nodes that are kept of it
# By round and row. Chains: in each round but the last one is rejected in part, the other kept.
TREES: Sequence[Sequence[Shape]] = (
    ((PARENTS, KEPT), (PARENTS, KEPT)),
    ((PARENTS, KEPT), (SMALLER, (0, 2))),
)
CHAINS: Sequence[Sequence[Shape]] = (
    ((CHAIN, range(2)), (SHORT_CHAIN, range(3))),
    ((CHAIN, range(6)), (SHORT_CHAIN, range(1))),
    ((CHAIN, range(1)), (SHORT_CHAIN, range(1))),
)


@dataclass(frozen=True)
class CheckTexts:
    """`trees`: tokens by round and row, of these shapes."""

    prompts: list[list[int]]
    trees: list[list[list[int]]]
    shapes: Sequence[Sequence[Shape]]

    @property
    def length(self) -> int:
        """That no row grows beyond."""
        return max(PROMPT_LENGTHS) + len(self.shapes) * len(PARENTS)

    def paths(self) -> list[list[int]]:
        """The path to each node, behind its prompt and what was kept of the trees before."""
        texts, paths = [list(prompt) for prompt in self.prompts], list[list[int]]()
        for shape, trees in zip(self.shapes, self.trees, strict=True):
            for text, tree, (parents, kept) in zip(texts, trees, shape, strict=True):
                for node in range(len(tree)):
                    paths.append(text + [tree[i] for i in path_to(node, parents)])
                text.extend(tree[node] for node in kept)
        return paths


def drawn_texts(vocab_size: int, chains: bool = False, rounds: int | None = None) -> CheckTexts:
    """The same ones every time. `rounds`: trees in turn, at most the last so many."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(0, vocab_size, (count,), generator=generator).tolist()

    shapes = (CHAINS if chains else TREES)[-(rounds or len(CHAINS)) :]
    prompts = [draw(length) for length in PROMPT_LENGTHS]
    trees = [[draw(len(PARENTS))[: len(parents)] for parents, _ in shape] for shape in shapes]
    return CheckTexts(prompts, trees, shapes)
