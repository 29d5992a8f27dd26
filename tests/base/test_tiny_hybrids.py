"""The tiny models of families with a state prove something: answers vary, and the state counts."""

from typing import Any

import pytest
import torch
from support.models.hybrids import HYBRIDS, VOCAB, tiny_hybrid
from transformers import CONFIG_MAPPING
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from medusa_kit.base.model import relative_error

OWN_STATES = ("minimax", "recurrent_gemma", "rwkv")  # not in transformers' cache layers
SHARED = [family for family in HYBRIDS if family not in OWN_STATES]


@pytest.fixture
def model(family: str) -> Any:
    if HYBRIDS[family][0] not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    return tiny_hybrid(family)


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("family", HYBRIDS)
def test_answers_vary(model: Any) -> None:
    said: set[int] = set()
    for length in (5, 9, 14):
        ids = random_ids(length)
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        said |= set(answer[0, length:].tolist())
    assert len(said) > 4


@torch.no_grad()
@pytest.mark.parametrize("kind", ["conv_states", "recurrent_states"])
@pytest.mark.parametrize("family", SHARED)
def test_a_lost_state_shows(model: Any, kind: str, family: str) -> None:
    """Far above the rounding that a check of logits allows."""
    ids = random_ids(12)
    expected = model(ids, use_cache=False).logits[:, 9:]
    out = model(ids[:, :9], use_cache=True)
    name = "cache_params" if "cache_params" in out else "past_key_values"
    states = [
        state
        for layer in out[name].layers
        if isinstance(layer, LinearAttentionCacheLayerMixin)
        for state in getattr(layer, kind).values()
        if state is not None
    ]
    assert states or (kind == "recurrent_states" and family.startswith("lfm2"))
    for state in states:
        state.zero_()
    logits = []
    for place in (9, 10, 11):
        places = {} if name == "cache_params" else {"position_ids": torch.tensor([[place]])}
        out = model(ids[:, place : place + 1], **{name: out[name]}, use_cache=True, **places)
        logits.append(out.logits)
    lost = relative_error(torch.cat(logits, 1), expected)
    assert lost > 0.1 if states else lost < 1e-3
