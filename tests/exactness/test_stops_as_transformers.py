"""Answers that a stop string ends: as many tokens as transformers' own generate gives."""

import pytest
import torch
from support.small_engines import build_engine, random_heads
from support.text.tokenizer_kinds import KINDS
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.infer.decode.text.token_bytes import UNFINISHED, token_bytes


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_answers_end_where_those_of_transformers_do(kind: str) -> None:
    """However the drafter comes by the tokens; the last token allowed may complete a stop too."""
    tokenizer = KINDS[kind]()
    model = tiny_model("llama-tied", vocab_size=len(tokenizer))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    model.generation_config.eos_token_id = None  # so that stop strings alone end answers
    base = wrap_model(model, tokenizer, "tiny")
    engine = build_engine(base, heads=random_heads(base))
    for seed in range(4):
        prompt = torch.randint(len(tokenizer), (1, 7), generator=torch.manual_seed(seed)).tolist()[
            0
        ]
        free = engine.generate(prompt, max_new_tokens=30).token_ids
        added = b"".join(token_bytes(tokenizer).of(token) for token in free)
        whole = max(added.decode(errors="replace").split(UNFINISHED), key=len)
        stops = [whole[len(whole) // 2 :][:2], "never"]
        plain = model.generate(
            torch.tensor([prompt]), max_new_tokens=30, do_sample=False, stop_strings=stops,
            tokenizer=tokenizer, attention_mask=torch.ones(1, len(prompt)),
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert len(plain) < len(free)
        for most in (30, len(plain)):
            for drafter in ("medusa", "none"):
                answer = engine.generate(prompt, max_new_tokens=most, stop=stops, drafter=drafter)
                assert (answer.token_ids, answer.finish_reason) == (plain, "stop")
                assert answer.stats.new_tokens == len(plain)
                pieces = engine.stream(prompt, max_new_tokens=most, stop=stops, drafter=drafter)
                assert "".join(pieces) == answer.text
