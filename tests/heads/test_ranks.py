import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_kit.base.model import wrap_model
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.ranks import MISSING, UNAVAILABLE, token_ranks


def heads_with_ties(projection):
    """Every output row appears three times, so that each logit has two equals.

    All numbers are whole and SiLU does not change those that occur, so that equal rows give equal
    logits in any order of summing, among any number of rows.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randint(-9, 10, (10, 8)).float().repeat(3, 1))
    ids_R = torch.tensor([1, 2, 4, 11, 12, 21, 25]) if projection == "reduced" else None
    heads = MedusaHeads.for_base(wrap_model(model), 3, 1, projection, ids_R)
    for blocks in heads.blocks:
        blocks[0].linear.weight.data.random_(-1, 2)
        blocks[0].linear.bias.data.fill_(64)
    if projection == "own":
        for own in heads.projections:
            own.weight.data.copy_(torch.randint(-9, 10, (10, 8)).float().repeat(3, 1))
    return heads, (range(30) if ids_R is None else ids_R.tolist())


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
def test_ranks_equal_a_sort_by_logit_then_id(projection):
    heads, ids = heads_with_ties(projection)
    hidden_PD = torch.randint(-2, 3, (40, 8)).float()
    targets_PK = torch.randint(-1, 30, (40, 3))
    with torch.no_grad():
        logits_KPR = heads(hidden_PD)
    ahead_PJ = torch.cat([torch.zeros(40, 1, dtype=torch.int64), targets_PK], dim=1)
    ranks_PK = token_ranks(heads, hidden_PD, ahead_PJ, num_ranks=5, chunk_positions=7)
    assert ranks_PK.dtype == torch.int16
    counts = {"rank": 0, "missing": 0}
    for p in range(40):
        for k in range(3):
            target = int(targets_PK[p, k])
            logits = dict(zip(ids, logits_KPR[k, p].tolist(), strict=True))
            order = sorted(logits, key=lambda token, logits=logits: (-logits[token], token))
            if target < 0:
                expected = UNAVAILABLE
            elif target not in order or order.index(target) >= 5:
                expected, counts["missing"] = MISSING, counts["missing"] + 1
            else:
                expected, counts["rank"] = order.index(target), counts["rank"] + 1
            assert ranks_PK[p, k] == expected
    assert counts["rank"] > 5
    assert counts["missing"] > 5


def test_an_untrained_head_ranks_as_the_base_does():
    heads, _ = heads_with_ties("shared")
    fresh = MedusaHeads.for_base(heads.base, 2)
    hidden_PD = torch.randint(-2, 3, (20, 8)).float()
    logits_PV = heads.base.head_logits(hidden_PD)
    order_PV = logits_PV.argsort(dim=-1, descending=True, stable=True)
    for rank in (0, 3):
        ahead_PJ = order_PV[:, rank : rank + 1].expand(-1, 3)
        assert (token_ranks(fresh, hidden_PD, ahead_PJ, 10) == rank).all()
