"""A base that counts, and rows and findings of the doctor's tests.

Token t is followed by t + 1, modulo VOCAB, and the heads know that. So what every check should say
is known without running anything.
"""

import random
from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.bench.doctor import Case, Finding, examine
from medusa_kit.data.readers import AnswerRow, Conversation
from medusa_kit.heads import MedusaHeads, save_heads
from support.tiny_models import STOP, tiny_model

VOCAB, K = 32, 3
TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def shifted_eye(by: int) -> torch.Tensor:
    """Row v is 1 at v - by: the token `by` places on."""
    return torch.eye(VOCAB).roll(by, dims=0)


def counting_base(step: int = 1) -> BaseModel:
    model = tiny_model("llama", vocab_size=VOCAB, hidden_size=VOCAB)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    model.model.embed_tokens.weight.data.copy_(torch.eye(VOCAB))
    model.lm_head.weight.data.copy_(shifted_eye(step))
    return wrap_model(model, None, "counting")


def save_counting_heads(base: BaseModel, folder: Path, off: int = 0) -> Path:
    heads = MedusaHeads.for_base(base, K, projection="own")
    for k, projection in enumerate(heads.projections):
        projection.weight.data.copy_(shifted_eye(k + 2 + off))
    save_heads(heads, folder)
    return folder


def answer(ids: list[int], number: int, prompt: int = 3, reason: str = "length") -> AnswerRow:
    return AnswerRow(ids[:prompt], ids[prompt:], reason, str(number), number)


def counting_rows() -> list[AnswerRow]:
    """Some end at the stop token, as counting past 31 does, some by length."""
    whole = [answer([(s + i) % VOCAB for i in range(VOCAB + STOP + 1 - s)], s, reason="stop")
             for s in range(4, 9)]  # fmt: skip
    return [*whole, answer(list(range(6, 24)), 20), answer(list(range(5, 30)), 21)]


def random_rows() -> list[AnswerRow]:
    draw = random.Random(0)
    return [answer([draw.randrange(3, VOCAB) for _ in range(20)], n) for n in range(1, 8)]


def talk(*contents: str, row: int = 1) -> Conversation:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return Conversation(messages, row, None, "here")


TALKS = [talk("Name a tree.", "An oak."), talk("And a bird?", "A wren.", "More?", "An owl.", row=2)]


def chat_case(template: str | None = "as it is", rows: Any = TALKS) -> Case:
    base = load_base_model("debug-tiny", device="cpu")
    if template != "as it is":
        base.tokenizer.chat_template = template
    return examine(base, rows)


def said(finding: Finding, status: str, *words: str) -> None:
    assert finding.status == status, finding
    for word in words:
        assert word in finding.what
    if status in ("warning", "problem") and finding.name != "loss mask":
        assert finding.hint
