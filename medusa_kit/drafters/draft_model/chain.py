"""One row's draft as the draft model writes it: a chain of its tokens.

Which token it takes depends on how the row's tokens are chosen:
- greedily: its likeliest, with its probability as the chance;
- drawn: the one that the row's own Gumbel noise picks from its processed logits, so that it is the
  base's draw as often as their distributions allow. Since the noise is known, chances are computed
  from the logits with noise.

Shapes: V vocabulary of the base, U of the draft.
"""

import math
from dataclasses import dataclass, field

from torch import Tensor

from medusa_kit.drafters.draft_model.lengths import Threshold
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
    threshold: Threshold
    limit: int  # tokens; below 1 nothing is drafted
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
            token, chance = self._pick(self.vocabulary.to_base(logits_U))
        except MedusaKitError:  # no token is possible; if the base has none either, its row says so
            token, chance = NOTHING, 0.0
        is_stop = token in self.stop_ids
        if token == NOTHING or (self.vocabulary.reads_text and is_stop):
            self.done = True
            return NOTHING
        depth = len(self.own_ids) + 1
        key = ("draft-model", min(depth, 4), round(4 * chance))
        self._tip = self.tree.add(self._tip, token, chance, key)
        self.prefix.append(token)
        self.own_ids.append(token)
        self.chance *= chance
        long_enough = depth >= self.limit or self.threshold.stops(self.chance)
        self.done = long_enough or is_stop
        return token

    def _pick(self, logits_V: Tensor) -> tuple[int, float]:
        """(the token, its chance); NOTHING where its scores are not finite."""
        if self.sampler is None or self.sampler.takes_argmax:
            scores_V = logits_V.float()
        else:
            scores_V = self.sampler.scores(logits_V, self.prefix)
        best, token = scores_V.max(-1)
        log_chance = float(best - scores_V.logsumexp(-1))  # NaN where any score is, or is infinite
        self.no_numbers = not log_chance > -math.inf
        return (NOTHING, 0.0) if self.no_numbers else (int(token), math.exp(log_chance))
