"""Batches that wait for their next request on the stand-in: their forwards serve it, unless the
model has become another one.

The oracle is transformers' own generate.
"""

from collections.abc import Callable
from typing import Any

import torch
from support.cuda_stand_in import Device
from support.small_engines import build_engine, random_prompt
from support.tiny_models import tiny_model
from torch import Tensor, nn

from medusa_kit.base.model import wrap_model

PROMPT = random_prompt(9, 9)


def copied(layer: nn.Linear, new: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(new)


def through_data(layer: nn.Linear, new: Tensor) -> None:
    layer.weight.data.copy_(new)


def replaced(layer: nn.Linear, new: Tensor) -> None:
    layer.weight = nn.Parameter(new, requires_grad=False)


def plain_answer(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False
    )
    answer: list[int] = out[0, len(PROMPT) :].tolist()
    return answer


def test_weights_that_change_between_requests(cuda_stand_in: Device) -> None:
    here, there = tiny_model("llama"), tiny_model("llama").to("cuda")
    engine = build_engine(wrap_model(there))
    assert engine.generate(PROMPT, max_new_tokens=10).token_ids == plain_answer(here)
    changes: list[Callable[[nn.Linear, Tensor], None]] = [copied, through_data, replaced]
    for change in changes:
        before, captured = plain_answer(here), cuda_stand_in.counts.captures
        assert engine.generate(PROMPT, max_new_tokens=10).token_ids == before, change
        assert cuda_stand_in.counts.captures == captured, "captured again for the same model"
        new = here.lm_head.weight.detach().flip(0)
        change(here.lm_head, new.clone())
        change(there.lm_head, new.to("cuda"))
        assert plain_answer(here) != before
        assert engine.generate(PROMPT, max_new_tokens=10).token_ids == plain_answer(here), change
