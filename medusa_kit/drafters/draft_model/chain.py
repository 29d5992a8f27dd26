"""One row's draft as the draft model writes it: a chain of its tokens, perhaps with siblings.

Which token it takes depends on how the row's tokens are chosen:
- greedily: its likeliest, with its probability as the chance;
- drawn: the one that the row's own Gumbel noise picks from its processed logits, so that it is the
  base's draw as often as their distributions allow. Since the noise is known, chances are computed
  from the logits with noise.

Shapes: V vocabulary of the base, U of the draft, R tokens taken at a node.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_kit.drafters.draft_model.lengths import Lengths
from medusa_kit.drafters.draft_model.shared_vocabulary import Vocabulary
from medusa_kit.errors import MedusaKitError
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.tree.draft_tree import DraftTree

NOTHING = -1  # a token that no node holds: the walk ends


@dataclass
class Chain:
    """`extend` is called at each node that the draft model has reached, until `done`."""

    text: list[int]  # the draft's ids up to the root
    prefix: list[int]  # ours, root included
    vocabulary: Vocabulary
    lengths: Lengths
    limit: int  # tokens; below 1 nothing is drafted
    width: int
    stop_ids: frozenset[int]  # in the ids that the draft picks
    sampler: Sampler | None = None
    tree: DraftTree = field(init=False)
    own_ids: list[int] = field(default_factory=list)  # the chain in the draft's ids
    chance: float = 1.0  # of the chain so far
    no_numbers: bool = False  # whether scores were NaN or infinite, which end it
    _tip: int = 0

    def __post_init__(self) -> None:
        self.tree = DraftTree(self.prefix[-1])
        self._root_position = len(self.prefix) - 1
        self.done = self.limit < 1

    @property
    def whole_text(self) -> list[int]:
        """The whole text in the draft model's ids, drafted tokens included."""
        return [*self.text, *self.own_ids]

    @property
    def newest(self) -> int:
        """The last token of that text."""
        return self.own_ids[-1] if self.own_ids else self.text[-1] if self.text else 0

    @property
    def up_to_root(self) -> list[int]:
        """The base's tokens, without drafted ones."""
        return self.prefix[: self._root_position + 1]

    def extend(self, logits_U: Tensor) -> int:
        """Append the draft model's next token; returns its id in the draft's vocabulary."""
        if self.done:
            return NOTHING
        try:
            tokens, chances = self._picks(self.vocabulary.to_base(logits_U))
        except MedusaKitError:  # no token is possible; if the base has none either, its row says so
            tokens, chances = [], []
        if not tokens or (self.vocabulary.kind == "text" and tokens[0] in self.stop_ids):
            self.done = True
            return NOTHING
        self._grow(tokens, chances)
        own = self.vocabulary.to_draft(tokens[0])
        self.own_ids.append(own)
        self.done = (
            len(self.own_ids) >= self.limit
            or tokens[0] in self.stop_ids
            or self.lengths.stops(self.chance)
        )
        return own

    def _grow(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        depth, tip = len(self.own_ids) + 1, self._tip
        for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            key = ("draft-model", min(rank, 2), min(depth, 4), round(4 * chance))
            node = self.tree.add(tip, token, chance, key)
            self._tip = node if rank == 0 else self._tip
        self.prefix.append(tokens[0])
        self.chance *= chances[0]

    def _picks(self, logits_V: Tensor) -> tuple[list[int], list[float]]:
        """(tokens_R, best first, their chances); none where its scores are not finite."""
        if self.sampler is None or self.sampler.takes_argmax:
            scores_V = logits_V.float()
        else:
            scores_V = self.sampler.scores(logits_V, self.prefix)
        best_R, tokens_R = scores_V.topk(min(self.width, len(scores_V)))
        log_R = best_R - scores_V.logsumexp(-1)  # NaN where any score is, or is infinite
        possible = int((log_R > -math.inf).sum())
        self.no_numbers = possible == 0
        both = torch.stack([tokens_R.double(), log_R.exp().double()])[:, :possible].tolist()
        return [int(token) for token in both[0]], both[1]
