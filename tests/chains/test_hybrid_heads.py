"""Heads and adapters by request on a model that carries a state."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.hybrids import tiny_hybrid
from support.small_engines import build_engine, random_heads, random_prompt

from medusa_kit.base import adapters
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.heads import save_heads
from medusa_kit.settings.recipe import LoraSection

TOKENS = 12


def base_of(family: str) -> BaseModel:
    return wrap_model(tiny_hybrid(family), None, family)


def put_adapter(folder: Path, family: str) -> None:
    """As Medusa-2 writes it, with weights large enough to change answers."""
    base, plain = base_of(family), base_of(family)
    adapters.put_on(base.model, LoraSection(rank=2, alpha=4, dropout=0.0))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in base.model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    known = plain.info.fingerprint
    about: Any = {"base_model": family, "revision": None, "base_fingerprint": known}
    adapters.save_adapter(base.model, folder, about)
    view = plain.view()
    own = str(plain.adapted_fingerprint(adapters.variant_of(folder)))
    view.info = replace(plain.info, fingerprint=own)
    save_heads(random_heads(view, 2), folder / "medusa_heads")


def answer_of(model: Any, prompt: list[int]) -> list[int]:
    ids_1T = torch.tensor([prompt])
    mask = torch.ones_like(ids_1T)
    whole_1T = model.generate(ids_1T, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
    return whole_1T[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_each_request_gets_its_heads_and_adapter(family: str, tmp_path: Path) -> None:
    put_adapter(tmp_path / "adapter", family)
    save_heads(random_heads(base_of(family), 3, kind="hydra"), tmp_path / "heads")
    merged = adapters.merge_into(tiny_hybrid(family), tmp_path / "adapter")
    engine, plain = build_engine(base_of(family)), tiny_hybrid(family)
    asked = ["adapter", None, "heads", "adapter", "heads", None]
    prompts = [random_prompt(5 + number % 3, number) for number in range(len(asked))]
    with HeadsStore(engine, tmp_path) as store, engine.shared_batch(max_rows=3) as shared:
        answers = [
            shared.submit(prompt, max_new_tokens=TOKENS, heads=name and store.get(name))
            for prompt, name in zip(prompts, asked, strict=True)
        ]
        found = [answer.result().token_ids for answer in answers]
    changed = 0
    for prompt, name, ids in zip(prompts, asked, found, strict=True):
        assert ids == answer_of(merged if name == "adapter" else plain, prompt)
        changed += name == "adapter" and ids != answer_of(plain, prompt)
    assert changed
