"""The two training stages, as modules whose forward computes the loss.

Medusa-1 (arXiv 2401.10774, §2.2.1): the base is frozen, heads learn from its hidden states.
Medusa-2 (§2.2.2): heads and base, or adapters on it, are trained together; loss = the base's own +
λ0 × the heads'. A KL term keeps the base close to the original (§2.3.2).

Shapes: P positions, K heads, J = K + 1 tokens ahead, S likeliest tokens of the base, W what heads
read of a position.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit.base import adapters
from medusa_kit.base.model import BaseModel
from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.settings.recipe import JointSection
from medusa_kit.train.batching import Batch
from medusa_kit.train.features.features import Positions
from medusa_kit.train.features.top_tokens import top_tokens
from medusa_kit.train.loss.loss import (
    HeadsLoss,
    LossOptions,
    SoftTargets,
    base_loss,
    heads_loss,
    target_counts,
)


@dataclass(frozen=True)
class Terms:
    """Counts and weights of a micro-batch's loss: the same for all of an update."""

    counts_K: Tensor  # targets of each head in the update
    count: Tensor  # positions in the update
    heads_weight: float = 1.0  # λ0 at this update


class Medusa1(nn.Module):
    """Heads on stored or live hidden states."""

    def __init__(self, heads: MedusaHeads, options: LossOptions) -> None:
        super().__init__()
        self.heads = heads
        self.options = options

    def terms(self, ahead_PJ: Tensor, heads_weight: float = 1.0) -> Terms:
        """The terms of an update with these targets in all its micro-batches together."""
        soft = self.options.soft_share > 0
        counts_K = target_counts(self.heads, ahead_PJ, soft)
        return Terms(counts_K, (ahead_PJ[:, 0] >= 0).sum().to(counts_K), heads_weight)

    def forward(self, batch: Batch, terms: Terms) -> HeadsLoss:
        assert batch.hidden_PD is not None
        with self.options.products(self.heads.base.device):
            return heads_loss(
                self.heads, batch.hidden_PD, batch.ahead_PJ, self.options, batch.soft,
                terms.counts_K,
            )  # fmt: skip

    def parameters_read_outside(self) -> list[nn.Parameter]:
        """Weights that are read outside their module's own forward, chunk by chunk."""
        return list(self.heads.projections.parameters())

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """(parameters, factor of the learning rate)."""
        return [(list(self.parameters()), 1.0)]


class Medusa2(nn.Module):
    """Base and heads together."""

    def __init__(self, medusa1: Medusa1, base: BaseModel, joint: JointSection) -> None:
        super().__init__()
        self.model = base.model
        self.medusa1 = medusa1
        self.joint = joint
        self._base = (base,)
        self.options = replace(medusa1.options, soft_share=joint.distill_share)

    @property
    def heads(self) -> MedusaHeads:
        return self.medusa1.heads

    def terms(self, ahead_PJ: Tensor, heads_weight: float = 1.0) -> Terms:
        return self.medusa1.terms(ahead_PJ, heads_weight)

    def forward(self, batch: Batch, terms: Terms) -> HeadsLoss:
        assert batch.rows is not None
        original = batch.original or self._original(batch)
        guesses = None
        if original is not None:
            top = original.cut(self.joint.distill_top)
            guesses = SoftTargets(top.likeliest_PS, top.chances_PS)
        hidden_PD = batch.rows.hidden_PD(self._base[0])
        own_loss = base_loss(
            self._base[0], hidden_PD, batch.ahead_PJ[:, 0], self.options, terms.count,
            guesses,
        )  # fmt: skip
        soft = None
        if original is not None and self.medusa1.options.soft_share > 0:
            count = self.medusa1.options.soft_top or self.joint.distill_top
            soft = original.cut(count).soft(torch.arange(len(hidden_PD), device=hidden_PD.device))
        ahead = Batch(batch.ahead_PJ, hidden_PD, soft)
        heads = self.medusa1(ahead, terms)
        loss = own_loss + terms.heads_weight * heads.loss
        return heads._replace(loss=loss, base=own_loss.detach())

    @torch.no_grad()
    def _original(self, batch: Batch) -> Positions | None:
        """The base's predictions without its adapters; None where they are not needed."""
        if not needs_original(self.joint, self.medusa1.options):
            return None
        assert batch.rows is not None
        base = self._base[0]
        training = self.model.training
        self.model.eval()  # no dropout in the targets
        with adapters.switched_off(self.model):
            hidden_PD = batch.rows.hidden_PD(base)
        self.model.train(training)
        top = original_top(self.joint, self.medusa1.options)
        guesses = top_tokens(base, hidden_PD, min(top, base.info.vocab_size))
        return Positions.without_runners_up(hidden_PD, batch.ahead_PJ, *guesses)

    def parameters_read_outside(self) -> list[nn.Parameter]:
        base = self._base[0]
        embeddings: list[Any] = [base.own_output, base.model.get_input_embeddings()]
        parameters = [p for embedding in embeddings for p in embedding.parameters(recurse=False)]
        return [*dict.fromkeys(parameters), *self.medusa1.parameters_read_outside()]

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        base = [p for p in self.model.parameters() if p.requires_grad]
        heads = list(self.medusa1.parameters())
        return [(base, 1.0), (heads, self.joint.heads_learning_rate_factor)]


def needs_original(joint: JointSection, options: LossOptions) -> bool:
    return joint.distill_share > 0 or options.soft_share > 0


def original_top(joint: JointSection, options: LossOptions) -> int:
    """Likeliest tokens of the original that are kept: the base's loss reads `distill_top` of them,
    the heads' `soft_top`, or as many where the recipe does not say."""
    return max(joint.distill_top, (options.soft_share > 0 and options.soft_top) or 0)
