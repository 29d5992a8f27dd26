"""Temperatures fitted to tokens drawn at a known temperature come back."""

import pytest
import torch
from support.small_engines import random_heads
from support.tiny_models import VOCAB, tiny_base

from medusa_kit.heads import MedusaHeads
from medusa_kit.tuning.temperature import TRIED_G, fit_temperatures

TRUE = (0.6, 1.0, 1.7)


@torch.no_grad()
def drawn(heads: MedusaHeads, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden_PD, ahead_PJ): each head's token drawn from its own softmax at its temperature."""
    torch.manual_seed(3)
    hidden_PD = torch.randn(count, 32)
    ahead_PJ = torch.randint(0, VOCAB, (count, 1))
    for k, temperature in enumerate(TRUE):
        logits_PR = heads.project(heads.transform(hidden_PD, k, ahead_PJ), k)
        tokens_P = torch.multinomial((logits_PR / temperature).softmax(-1), 1)[:, 0]
        if heads.column_ids is not None:
            tokens_P = heads.column_ids[tokens_P]
        ahead_PJ = torch.cat([ahead_PJ, tokens_P[:, None]], dim=1)
    return hidden_PD, ahead_PJ


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
@pytest.mark.parametrize("projection", ["shared", "reduced"])
def test_known_temperatures_come_back(kind: str, projection: str) -> None:
    reduced = torch.arange(0, VOCAB, 2) if projection == "reduced" else None
    heads = random_heads(tiny_base("llama"), kind=kind, projection=projection, reduced_ids=reduced)
    hidden_PD, ahead_PJ = drawn(heads, 6000)
    ahead_PJ[::7, 1:] = -1  # the answer's end
    if reduced is not None:
        ahead_PJ[3::7, 1:] = 1  # not in the projection
    fitted = fit_temperatures(heads, hidden_PD, ahead_PJ)
    assert fitted == pytest.approx(TRUE, rel=0.08)


def test_the_parabola_finds_what_lies_between_the_tried() -> None:
    """The loss at the fitted temperature is below that at every temperature tried."""
    heads = random_heads(tiny_base("llama"), num_heads=3)
    hidden_PD, ahead_PJ = drawn(heads, 2000)
    fitted = fit_temperatures(heads, hidden_PD, ahead_PJ)

    def loss(k: int, temperature: float) -> float:
        logits_PR = heads.project(heads.transform(hidden_PD, k), k).double() / temperature
        return float(torch.nn.functional.cross_entropy(logits_PR, ahead_PJ[:, k + 1]))

    for k, temperature in enumerate(fitted):
        assert temperature not in TRIED_G.tolist()
        assert loss(k, temperature) < min(loss(k, t) for t in TRIED_G.tolist())


def test_heads_without_positions_keep_their_scale() -> None:
    heads = random_heads(tiny_base("llama"))
    ahead_PJ = torch.tensor([[5, 6, -1, -1]])
    fitted = fit_temperatures(heads, torch.randn(1, 32), ahead_PJ)
    assert fitted[1:] == (1.0, 1.0)
    assert TRIED_G[0] <= fitted[0] <= TRIED_G[-1]
