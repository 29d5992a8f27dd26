"""Whole rows, for heads with a prefix layer: it reads a row from its first token on.

Features are then of every token up to the last one trained on (`HeadTargets.whole_row`), and heads
read them at the trained positions, beside the prefix layer's output there. Rows lie one after the
other, without padding; only attention keeps them apart.

Shapes: T tokens of all rows, P trained positions, D hidden, W what heads read of a position,
H query heads, G key/value heads, E head size.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.prefix_layer import causal
from medusa_kit.heads.ranks import head_parameter_dtype
from medusa_kit.train.data import HeadTargets
from medusa_kit.train.features.features import Positions, batches


class WholeRows(NamedTuple):
    """Where rows and trained positions are in the tokens of a batch."""

    lengths: list[int]
    trained_P: Tensor  # places among the T tokens

    @classmethod
    def of(cls, items: Sequence[HeadTargets]) -> "WholeRows":
        known = [torch.from_numpy(item.ahead_PJ[:, 0] >= 0) for item in items]
        return cls([len(item.positions_P) for item in items], torch.cat(known).nonzero().flatten())

    def trained(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD[self.trained_P.to(hidden_TD.device)]

    def read_by(self, heads: MedusaHeads, hidden_TD: Tensor) -> Tensor:
        """read_PW: what heads read at the trained positions, in their dtype.

        The prefix layer is called once, whatever the rows: under ZeRO-3 every process must call it
        equally often.
        """
        hidden_TD = hidden_TD.to(heads.base.device, head_parameter_dtype(heads))
        assert heads.prefix is not None, "only heads with a prefix layer read whole rows"
        edges = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        positions_T = torch.cat([torch.arange(length) for length in self.lengths])

        def attend(q_1HTE: Tensor, k_1GTE: Tensor, v_1GTE: Tensor) -> Tensor:
            rows = [slice(start, end) for start, end in pairwise(edges)]
            low = torch.is_autocast_enabled("cpu") and q_1HTE.device.type == "cpu"
            of_row = causal_16_bits if low else causal
            parts = [of_row(q_1HTE[:, :, r], k_1GTE[:, :, r], v_1GTE[:, :, r]) for r in rows]
            return torch.cat(parts, dim=2)

        outputs_1TD = heads.prefix(hidden_TD[None], positions_T[None].to(hidden_TD.device), attend)
        return self.trained(torch.cat([hidden_TD, outputs_1TD[0]], dim=-1))


def causal_16_bits(q_1HTE: Tensor, k_1GTE: Tensor, v_1GTE: Tensor) -> Tensor:
    """`causal` by two products under autocast: on a CPU its gradient takes torch's own attention
    three times as long."""
    G, T, E = k_1GTE.shape[1:]
    groups = q_1HTE.shape[1] // G  # query heads of a key/value head
    q_GXE = q_1HTE[0].reshape(G, groups * T, E) * E**-0.5
    scores_GXT = q_GXE @ k_1GTE[0].transpose(1, 2)
    later_TT = torch.ones(T, T, dtype=torch.bool, device=q_GXE.device).triu(1)
    scores_GXT = scores_GXT.view(G, groups, T, T).masked_fill(later_TT, -torch.inf).flatten(1, 2)
    return (scores_GXT.softmax(-1) @ v_1GTE[0]).view(1, G * groups, T, E)


@torch.no_grad()
def read_rows(
    heads: MedusaHeads, store: Positions, items: Sequence[HeadTargets], batch_tokens: int
) -> Positions:
    """The trained positions of these whole rows, whose tokens are in `store` one after the other,
    with what heads read there in place of the hidden states."""
    parts, done = [], 0
    for group in batches(items, batch_tokens, packing=True):
        rows = WholeRows.of(group)
        some = Positions(*(part[done : done + sum(rows.lengths)] for part in store))
        read = [rows.trained(part) for part in some[1:]]
        parts.append(Positions(rows.read_by(heads, some.hidden_PD), *read))
        done += sum(rows.lengths)
    return Positions.joined(parts)
