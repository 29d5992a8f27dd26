"""Text that is known beforehand, and a drafter whose guesses of it are right by a given chance.

It takes the place of heads: a table on the device has, for every token, the guesses of each head.
Which of them are right is drawn once, from a seed. A draft costs one look-up, so a step with it
takes the time of the verify step alone.

Shapes: B batch, K heads, N nodes of a tree, V vocabulary, D hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.workbench import Workbench
from medusa_kit.base.model import BaseModel
from medusa_kit.bench.gpu.shapes import Shape
from medusa_kit.errors import MedusaKitError
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.draws import RowsDraws
from medusa_kit.transfer import to_device
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.shape import shape_of

NUM_HEADS = 4
PROMPT, ANSWER = 128, 96
FIRST_GUESS_RIGHT = 0.6  # assumed by `tree_of`; the share of rank r falls with its square


class Table:
    """A `Guesser` of `guess_KV`, which fills static trees whose tokens are not drawn."""

    def __init__(self, guess_KV: Tensor) -> None:
        self.guess_KV = guess_KV

    def look(self) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> None: ...

    def grow(self, *_: Any, **__: Any) -> None: ...

    def fill(
        self,
        hidden_BD: Tensor,
        roots_B: Sequence[int],
        parents_N: Tensor,
        ranks_N: Tensor,
        draws: RowsDraws | None = None,
    ) -> Tensor | None:
        if draws is not None:
            return None
        device = self.guess_KV.device
        depths_N = to_device(shape_of(tuple(parents_N.tolist())).depths_N, device)
        roots_B1 = to_device(roots_B, device)[:, None]
        best_BN = self.guess_KV[depths_N[1:] - 1, roots_B1]
        others_BN = best_BN + to_device(ranks_N, device)[1:]
        return torch.cat([roots_B1, others_BN % self.guess_KV.shape[1]], dim=1)


class KnownText(MedusaHeads):
    """Heads whose best guesses come from a table (`Table`, their guesser); greedy drafts never read
    their weights.

    Second and later guesses are always wrong, so acceptance does not depend on the tree.
    """

    @classmethod
    def of(cls, base: BaseModel, next_V: Tensor, right_share: float, seed: int = 0) -> "KnownText":
        """`next_V`: the token after each. `right_share`: the share of right guesses at a depth."""
        heads = cls.for_base(base, NUM_HEADS)
        assert isinstance(heads, KnownText)
        generator = torch.Generator().manual_seed(seed)
        drawn_KV = torch.rand(NUM_HEADS, len(next_V), generator=generator).to(next_V.device)
        token_V, guesses = torch.arange(len(next_V), device=next_V.device), []
        for right_V in drawn_KV < right_share:
            token_V = next_V[token_V]  # heads[0] guesses the token after the root
            wrong_V = (token_V + len(next_V) // 2) % len(next_V)
            guesses.append(torch.where(right_V, token_V, wrong_V))
        heads.guesser = Table(torch.stack(guesses))
        return heads.requires_grad_(False)


def share_for(acceptance_length: float) -> float:
    """The share of right guesses with which steps emit that many tokens on average.

    With a share p they emit 1 + p + p² + … over the heads. Raises ValueError where no share does.
    """
    if not 1 <= acceptance_length <= NUM_HEADS + 1:
        raise ValueError(f"{acceptance_length} tokens a step; expected 1 to {NUM_HEADS + 1}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        emitted = sum(middle**depth for depth in range(NUM_HEADS + 1))
        low, high = (middle, high) if emitted < acceptance_length else (low, middle)
    return low


def tree_of(num_nodes: int) -> CandidateTree:
    """A tree of that many nodes, with the likeliest paths, as searches find them."""
    open_paths: dict[tuple[int, ...], float] = {(0,): FIRST_GUESS_RIGHT}
    paths: list[tuple[int, ...]] = []
    while len(paths) < num_nodes - 1:
        path = max(open_paths, key=lambda one: open_paths[one])
        value = open_paths.pop(path)
        paths.append(path)
        above, rank = path[:-1], path[-1]
        open_paths[(*above, rank + 1)] = value * ((rank + 1) / (rank + 2)) ** 2
        if len(path) < NUM_HEADS:
            open_paths[(*path, 0)] = value * FIRST_GUESS_RIGHT
    return CandidateTree.from_choices(paths)


def some_prompts(bench: Workbench, shape: Shape, length: int, rows: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, shape.vocab_size, (rows, length), generator=generator)
    return ids.tolist()


def answer_length(bench: Workbench) -> int:
    return bench.size(ANSWER, 12)


def check_text(bench: Workbench, shape: Shape, prompt: list[int], answer: list[int]) -> None:
    """Raises MedusaKitError where greedy text, which is known beforehand, is wrong."""
    next_V, token = bench.successors(shape).tolist(), prompt[-1]
    for place, found in enumerate(answer):
        token = next_V[token]
        if found != token:
            raise MedusaKitError(f"token {place} of the greedy answer is {found}, not {token}")


def rule_name(temperature: float) -> str:
    return "greedy" if temperature == 0 else "sampled"
