"""The promise on a CUDA device; these skip themselves where there is none."""

import pytest
import torch
from tiny_models import PROMISED, tiny_base, tiny_model

from medusa_kit.base_model import wrap_model
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.loading import build_engine
from medusa_kit.tree.candidate_tree import CandidateTree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
TREE = CandidateTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


@pytest.mark.parametrize("family", PROMISED)
def test_greedy_equals_transformers_on_cuda(family: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_model(family).cuda()
    prompt = list(range(5, 17))
    ids = torch.tensor([prompt], device="cuda")
    out = tiny_model(family).cuda().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )  # fmt: skip
    engine = build_engine(wrap_model(model))
    engine.heads = MedusaHeads.for_base(engine.base, num_heads=3).requires_grad_(False)
    engine.use_tree(TREE)
    assert engine.generate(prompt, max_new_tokens=24).token_ids == out[0, len(prompt) :].tolist()


def test_same_seed_same_text_as_on_the_cpu() -> None:
    prompt = list(range(5, 17))
    texts = []
    for device in ("cpu", "cuda"):
        engine = build_engine(wrap_model(tiny_base("llama").model.to(device)))
        result = engine.generate(prompt, max_new_tokens=24, temperature=0.9, seed=4)
        texts.append(result.token_ids)
    assert texts[0] == texts[1]
