"""A model whose vocabulary grows or shrinks under a loaded engine: what drafts by tokens of before
it guesses worse, and every answer is that of plain transformers generate.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.changes import made
from support.small_engines import build_engine, random_heads, random_prompt

from medusa_kit.base.model import wrap_model

PROMPTS = [random_prompt(5 + number, number, vocab_size=90) for number in range(4)]
LARGE, SMALL = 150, 90
SOURCES = ["recycling", "suffix", "draft-model", "medusa", "auto"]


def resize(model: Any, size: int) -> None:
    """Rows that are added are the likeliest of all."""
    torch.manual_seed(0)
    before = model.config.vocab_size
    model.resize_token_embeddings(size, mean_resizing=False)
    rows = model.get_output_embeddings().weight.data
    rows[before:] = rows[: max(size - before, 0)] * 3


def plain(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def engine_of(family: str, source: str) -> Any:
    base = wrap_model(made(family), None, "base")
    options: dict[str, Any] = {}
    if source in ("draft-model", "auto"):
        options["draft_model"] = wrap_model(made(family), None, "draft")
    if source == "medusa":
        ids = torch.arange(0, 96, 2)
        options["heads"] = random_heads(base, projection="reduced", reduced_ids=ids)
    return build_engine(base, **options)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", ["llama-tied", "phi3"])
def test_rows_that_come_and_go(family: str, source: str, tmp_path: Path) -> None:
    engine, twin = engine_of(family, source), made(family)
    asked: dict[str, Any] = {"max_new_tokens": 8, "drafter": source}
    if source == "suffix":
        asked["drafter_options"] = {"store": str(tmp_path / "answers")}
    for size in (96, LARGE, SMALL, LARGE, 96):
        for model in (engine.base.model, twin):
            resize(model, size)
        for _ in range(2):  # the second knows the answers of the first
            answers = [result.token_ids for result in engine.generate(PROMPTS, **asked)]
            assert answers == [plain(twin, prompt) for prompt in PROMPTS]
        if size == LARGE:
            assert max(map(max, answers)) >= 96


@pytest.mark.parametrize("size", [LARGE, SMALL])
def test_a_draft_model_of_another_size(size: int) -> None:
    engine = engine_of("llama-tied", "draft-model")
    twin = made("llama-tied")
    for _ in range(2):
        results = engine.generate(PROMPTS, max_new_tokens=8, drafter="draft-model")
        answers = [result.token_ids for result in results]
        assert answers == [plain(twin, prompt) for prompt in PROMPTS]
        resize(engine.draft_model.model, size)
