"""A decoder layer over the base's hidden states of the whole prefix, whose output every head reads
beside the hidden state (Hydra++'s prefix attention, arXiv 2402.05109, §4).

    x = unit(h)                                  h: the base's hidden state, scaled to unit RMS
    x = x + out(attention(norm(x)))              rotary positions, keys of all tokens before
    x = x + down(SiLU(gate(norm(x))) * up(norm(x)))
    output = norm(x)

A token's output depends on the tokens up to it alone. So the layer runs with the base, as one more
layer of each forward, and its keys and values lie in the tree cache as those of any layer.

Its keys have the number of heads and the size of the base's, so that one block of memory holds all
layers. `out` and `down` are zero until trained.

Shapes: D hidden, X any leading shape, H query heads, G key/value heads, E head size, M units of the
MLP, B batch, T tokens.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_kit.errors import ConfigError

NORM_EPSILON = 1e-5
ROTARY_BASE = 10_000.0

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q_BHTE, k_BGTE, v_BGTE) -> out_BHTE


@dataclass(frozen=True)
class PrefixSizes:
    """The sizes of a prefix layer."""

    query_heads: int
    kv_heads: int
    head_size: int
    mlp: int

    @classmethod
    def of_base(cls, config: Any, hidden_size: int) -> "PrefixSizes":
        """Those of a layer of the base with this config; where it does not name one, the usual."""
        config = config.get_text_config()
        heads = getattr(config, "num_attention_heads", None) or max(1, hidden_size // 64)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_size = getattr(config, "head_dim", None) or hidden_size // heads
        mlp = getattr(config, "intermediate_size", None)
        return cls(heads, kv_heads, head_size, mlp if isinstance(mlp, int) else 4 * hidden_size)

    @classmethod
    def read(cls, said: Any) -> "PrefixSizes":
        """From a file. Raises ConfigError, which names what is wrong."""
        names = [field.name for field in fields(cls)]
        if not isinstance(said, dict) or sorted(said) != sorted(names):
            raise ConfigError(f"prefix_sizes is {said!r}, expected {', '.join(names)}")
        for name in names:
            if type(said[name]) is not int or said[name] < 1:
                raise ConfigError(
                    f"prefix_sizes: {name} is {said[name]!r}, expected a whole number from 1 on"
                )
        sizes = cls(**said)
        if sizes.query_heads % sizes.kv_heads or sizes.head_size % 2:
            raise ConfigError(
                f"prefix_sizes are {said}: expected kv_heads that divide query_heads, and an even "
                "head_size"
            )
        return sizes

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @property
    def cached(self) -> str:
        """What a token's keys, or values, are in the cache: it must be as in the base."""
        return f"{self.kv_heads} x {self.head_size}"


class PrefixLayer(nn.Module):
    """One decoder layer. Maps hidden_BTD to outputs_BTD."""

    def __init__(self, hidden_size: int, sizes: PrefixSizes, **factory: Any) -> None:
        super().__init__()
        self.sizes = sizes
        queries, keys = (n * sizes.head_size for n in (sizes.query_heads, sizes.kv_heads))

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, **factory)

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden_size, eps=NORM_EPSILON, **factory)

        self.attention_norm, self.mlp_norm, self.norm = norm(), norm(), norm()
        self.wq, self.wo = linear(hidden_size, queries), linear(queries, hidden_size)
        self.wk, self.wv = linear(hidden_size, keys), linear(hidden_size, keys)
        self.w1, self.w3 = linear(hidden_size, sizes.mlp), linear(hidden_size, sizes.mlp)
        self.w2 = linear(sizes.mlp, hidden_size)
        nn.init.zeros_(self.wo.weight)
        nn.init.zeros_(self.w2.weight)

    def forward(
        self,
        hidden_BTD: Tensor,
        positions_BT: Tensor | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        """outputs_BTD. By default the rows are whole texts, padded on the right if at all."""
        if positions_BT is None:
            positions_BT = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)[None]
        x_BTD = F.rms_norm(hidden_BTD, hidden_BTD.shape[-1:], eps=NORM_EPSILON)
        normed_BTD = self.attention_norm(x_BTD)
        cos, sin = self._rotary(positions_BT, x_BTD.dtype)
        q, k = (rotated(self._heads(w(normed_BTD)), cos, sin) for w in (self.wq, self.wk))
        out_BHTE = (attend or causal)(q, k, self._heads(self.wv(normed_BTD)))
        x_BTD = x_BTD + self.wo(out_BHTE.transpose(1, 2).flatten(2))
        normed_BTD = self.mlp_norm(x_BTD)
        return self.norm(x_BTD + self.w2(F.silu(self.w1(normed_BTD)) * self.w3(normed_BTD)))

    def _heads(self, x_BTW: Tensor) -> Tensor:
        return x_BTW.unflatten(-1, (-1, self.sizes.head_size)).transpose(1, 2)

    def _rotary(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos_B1TE, sin_B1TE)."""
        rates_E = inverse_frequencies(self.sizes.head_size, positions_BT.device)
        angles_BTE = positions_BT[..., None] * rates_E
        angles_B1TE = torch.cat([angles_BTE, angles_BTE], dim=-1)[:, None]
        return angles_B1TE.cos().to(dtype), angles_B1TE.sin().to(dtype)


def inverse_frequencies(head_size: int, device: torch.device | None = None) -> Tensor:
    """Of the rotary embedding, [head_size / 2], made on the device: a captured step copies nothing
    to it."""
    return ROTARY_BASE ** -(torch.arange(0, head_size, 2, device=device).float() / head_size)


def rotated(x_BHTE: Tensor, cos_B1TE: Tensor, sin_B1TE: Tensor) -> Tensor:
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_B1TE + torch.cat([-second, first], dim=-1) * sin_B1TE


def causal(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor) -> Tensor:
    """Attention of each token to those up to it."""
    return F.scaled_dot_product_attention(q_BHTE, k_BGTE, v_BGTE, is_causal=True, enable_gqa=True)
