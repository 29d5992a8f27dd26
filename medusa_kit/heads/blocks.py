"""The layers that heads are made of: the residual blocks of a head of its own, and the network that
heads of kind `recurrent` share.

Shapes: D hidden, X any leading shape, E embedding of a token, M units of an
MLP, K heads, V vocabulary, R rows of it, B batch, Q paths of one depth.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_kit.base.model import BaseModel
from medusa_kit.heads.config import HeadsConfig

NORM_EPSILON = 1e-5
UNIT_EPSILON = 1e-12  # only against division by 0: a vector of unit RMS stays as it is


class ResidualBlock(nn.Module):
    """x + SiLU(W[x; e] + b), the identity until trained. Keeps the shape x_XD."""

    def __init__(self, hidden_size: int, read_size: int = 0, **factory: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size + read_size, hidden_size, **factory)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_XD: Tensor, read_XE: Tensor | None = None) -> Tensor:
        inputs = x_XD if read_XE is None else torch.cat([x_XD, read_XE], dim=-1)
        return x_XD + F.silu(self.linear(inputs))


def residual_blocks(config: HeadsConfig, read_size: int, factory: dict[str, Any]) -> nn.ModuleList:
    """The blocks of one head; the first also reads `read_size` numbers of the path."""
    sizes = [read_size] + [0] * (config.num_blocks - 1)
    return nn.ModuleList(ResidualBlock(config.hidden_size, size, **factory) for size in sizes)


class GatedBlock(nn.Module):
    """u + W2(SiLU(W1 n) * W3 n) with n = norm(u), a Llama layer's MLP; the identity until trained.
    Keeps the shape u_XD."""

    def __init__(self, hidden_size: int, mlp_size: int, **factory: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=NORM_EPSILON, **factory)
        self.w1 = nn.Linear(hidden_size, mlp_size, bias=False, **factory)
        self.w3 = nn.Linear(hidden_size, mlp_size, bias=False, **factory)
        self.w2 = nn.Linear(mlp_size, hidden_size, bias=False, **factory)
        nn.init.zeros_(self.w2.weight)

    def forward(self, u_XD: Tensor) -> Tensor:
        normed_XD = self.norm(u_XD)
        return u_XD + self.w2(F.silu(self.w1(normed_XD)) * self.w3(normed_XD))


class RecurrentNetwork(nn.Module):
    """What heads of kind `recurrent` share: a step from one state to the next.

        u = input [unit(s); unit(e)]     s: the state, e: a token
        u = block(u) for each block
        the next state is u; head k's output is unit(u) * gain[k]

    Until trained, `input` gives unit(s) again, so every output is the unit of the first state.
    """

    def __init__(self, config: HeadsConfig, embedding_size: int, **factory: Any) -> None:
        super().__init__()
        D = config.hidden_size
        assert config.mlp_size is not None
        self.input = nn.Linear(D + embedding_size, D, bias=False, **factory)
        self.blocks = nn.ModuleList(
            GatedBlock(D, config.mlp_size, **factory) for _ in range(config.num_blocks)
        )
        self.gain = nn.Parameter(torch.ones(config.num_heads, D, **factory))
        with torch.no_grad():  # not nn.init.eye_, which on the meta device imports torch's compiler
            self.input.weight.zero_().diagonal().fill_(1.0)

    def forward(self, state_XD: Tensor, token_XE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(next state_XD, output_XD of head k). `token_XE` has unit RMS."""
        inputs = torch.cat([unit(state_XD), token_XE], dim=-1)
        u_XD = self.input(inputs).to(state_XD.dtype)  # 16 bits only in products, not between them
        for block in self.blocks:
            u_XD = block(u_XD)
        return u_XD, unit(u_XD) * self.gain[k]


class Walk:
    """The states of recurrent heads where a tree is filled depth by depth, so that each head takes
    one step from the states that the last one left. Empty until a head has put them there."""

    state_BQD: Tensor | None = None  # after each path of the last depth

    def copy(self) -> "Walk":
        """Goes on from the same states by itself."""
        walk = Walk()
        walk.state_BQD = self.state_BQD
        return walk

    def follow(self, rows: Tensor) -> None:
        """`rows`, Q or BQ: which path of the last depth each of the next ones continues."""
        if self.state_BQD is None:
            return
        if rows.dim() == 1:
            self.state_BQD = self.state_BQD[:, rows]
        else:
            rows_BQD = rows[..., None].expand(-1, -1, self.state_BQD.shape[-1])
            self.state_BQD = self.state_BQD.gather(1, rows_BQD)


def unit(x_XD: Tensor) -> Tensor:
    """x / rms(x)."""
    return F.rms_norm(x_XD, x_XD.shape[-1:], eps=UNIT_EPSILON)


def rms(x_XD: Tensor) -> Tensor:
    """The root mean square of each row: rms_X1."""
    wide_XD = x_XD.to(torch.promote_types(x_XD.dtype, torch.float32))
    return wide_XD.square().mean(-1, keepdim=True).sqrt().to(x_XD.dtype)


def mlp_size_of(base: BaseModel) -> int:
    """Units of the MLP in a layer of the base; where its config does not name them, the usual."""
    size = getattr(base.config.get_text_config(), "intermediate_size", None)
    return size if isinstance(size, int) else 4 * base.info.hidden_size


def copy_of_embedding(base: BaseModel, ids_R: Tensor | None) -> nn.Linear:
    """A trainable Linear with the weights (and bias) of the base's output embedding, or rows."""
    weight_RD, bias_R = base.output_rows(ids_R)
    num_columns, hidden_size = weight_RD.shape
    copy = nn.Linear(
        hidden_size, num_columns, bias=bias_R is not None, device=base.device, dtype=base.dtype
    )
    with torch.no_grad():
        copy.weight.copy_(weight_RD)
        if bias_R is not None:
            copy.bias.copy_(bias_R)
    return copy
