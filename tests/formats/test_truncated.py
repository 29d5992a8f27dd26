"""Heads with own rows for some tokens alone: exact decoding, and ranks that calibration can count.

Shapes: T tokens, R columns of a projection, P positions, J tokens ahead, K heads.
"""

import torch
from support.small_engines import BUSHY, build_engine, endless_base, random_heads, random_prompt

from medusa_kit.heads.ranks import MISSING, token_ranks


def test_heads_with_own_rows_for_some_tokens_draft_exactly() -> None:
    """The form that truncated vocabularies of vLLM take here: guessed right now and then."""
    base, oracle = endless_base(24), endless_base(24)
    ids_R = torch.arange(0, 24, 3)
    heads = random_heads(base, projection="own", reduced_ids=ids_R)
    engine = build_engine(base, heads=heads, tree=BUSHY)
    prompt = random_prompt(9, seed=1, vocab_size=24)
    result = engine.generate(prompt, max_new_tokens=24)
    expected_1T = oracle.model.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, attention_mask=torch.ones(1, 9)
    )
    assert result.token_ids == expected_1T[0, 9:].tolist()
    assert result.stats.acceptance_length > 1
    ahead_PJ = torch.tensor([[1, 3, 6, 9], [1, 2, 6, 9]])
    ranks_PK = token_ranks(heads, torch.randn(2, 32), ahead_PJ, 8)
    assert (ranks_PK[0] < 8).all()
    assert ranks_PK[1, 0] == MISSING
