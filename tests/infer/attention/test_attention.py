"""Tree attention against the formula in float64, one query at a time."""

import math

import pytest
import torch
from support.attention_inputs import step_of

from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.attention import install_tree_attention
from medusa_kit.infer.attention.backend import AttentionCall
from medusa_kit.infer.attention.sdpa import tree_sdpa

H, E = 6, 8


def by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor,
    scale: float, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """[B, N, H, E] in float64, head h reading key/value head h // (H / G)."""
    B, heads, N, _ = query.shape
    out = torch.zeros(B, N, heads, value.shape[-1], dtype=torch.float64)
    for b in range(B):
        for h in range(heads):
            g = h * key.shape[1] // heads
            for n in range(N):
                seen = mask[b, 0, n].nonzero().flatten()
                scores = key[b, g, seen].double() @ query[b, h, n].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                total = weights.sum() + (0 if sinks is None else math.exp(sinks[h]))
                out[b, n, h] = (weights / total) @ value[b, g, seen].double()
    return out


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks"])
def test_equals_the_formula(groups: int, window: int | None, extra: str) -> None:
    step = step_of([7, 3])
    L = step.num_positions
    query, key = torch.randn(2, H, 6, E), torch.randn(2, groups, L, E)
    value = torch.randn(2, groups, L, E)
    softcap = 2.0 if extra == "softcap" else None
    sinks = torch.randn(H) if extra == "sinks" else None
    out = tree_sdpa(AttentionCall(query, key, value, step, 0.3, window, softcap, sinks))
    expected = by_hand(query, key, value, step.mask(window), 0.3, softcap, sinks)
    assert out.shape == (2, 6, H, E)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)


def test_values_may_be_wider_than_keys() -> None:
    step = step_of([4])
    query, key, value = torch.randn(1, H, 6, E), torch.randn(1, 2, 10, E), torch.randn(1, 2, 10, 12)
    expected = by_hand(query, key, value, step.mask(None), 0.5, None, None)
    out = tree_sdpa(AttentionCall(query, key, value, step, 0.5))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)


def test_slots_out_of_sight_leave_no_trace() -> None:
    """Whatever lies in slots past a row's end, or in a sibling, must not reach the output."""
    step = step_of([7, 3])
    query, key, value = (torch.randn(2, n, m, E) for n, m in ((H, 6), (2, 13), (2, 13)))
    before = tree_sdpa(AttentionCall(query, key, value, step, 0.3))
    key[1, :, 9:], value[1, :, 9:] = 1e4, 1e4  # row 1 ends at 3 + 6 slots
    key[0, :, 8], value[0, :, 8] = 1e4, 1e4  # node 1 of row 0: seen by itself and node 3 alone
    after = tree_sdpa(AttentionCall(query, key, value, step, 0.3))
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0, [0, 2, 4, 5]], after[0, [0, 2, 4, 5]])
    assert not torch.equal(before[0, 3], after[0, 3])


def test_a_model_without_exchangeable_attention_is_refused() -> None:
    class Stubborn(torch.nn.Module):
        def set_attn_implementation(self, name: str) -> None:
            raise ValueError("no")

    with pytest.raises(IncompatibleBaseError, match="Stubborn does not let its attention"):
        install_tree_attention(Stubborn())
