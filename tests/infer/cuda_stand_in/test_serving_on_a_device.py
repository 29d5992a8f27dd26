"""Answers that share a CUDA device, and what comes of a device that fails. It is a stand-in."""

from typing import Any

import pytest
import torch
from support.callers import all_at_once
from support.cuda_stand_in import Device
from support.partly_knowing import plain_answer
from support.serving.live_server import live_server
from support.small_engines import (
    BUSHY,
    build_engine,
    lively_chat_base,
    random_heads,
    random_prompt,
)
from support.tiny_models import tiny_base, tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import DeviceMemoryError

TOKENS = 6
PROMPTS = [random_prompt(4 + 3 * n, n) for n in range(4)]
DRAFTERS = ("medusa", "auto", "none", "suffix")


def engine_there(**options: Any) -> Engine:
    base = wrap_model(tiny_model("llama").to("cuda"))
    return build_engine(base, heads=random_heads(base), tree=BUSHY, **options)


def test_threads_share_a_batch(cuda_stand_in: Device) -> None:
    """With drafters of their own, greedy or drawn, more of them than rows."""
    here, engine = build_engine(tiny_base("llama")), engine_there()
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_new_tokens": TOKENS}
    expected = [here.generate(one, drafter="none", **drawn).token_ids for one in PROMPTS]
    with engine.shared_batch(max_rows=3) as shared:

        def ask(number: int) -> tuple[list[int], list[int]]:
            prompt, drafter = PROMPTS[number], DRAFTERS[number]
            greedy = shared.generate(prompt, drafter=drafter, max_new_tokens=TOKENS)
            return greedy.token_ids, shared.generate(prompt, drafter=drafter, **drawn).token_ids

        found = all_at_once(ask, len(PROMPTS))
    assert [one for one, _ in found] == [plain_answer("llama", p, TOKENS) for p in PROMPTS]
    assert [other for _, other in found] == expected
    assert cuda_stand_in.counts.failed_captures == 0


@pytest.mark.usefixtures("cuda_stand_in")
def test_a_server_answers() -> None:
    tiny = lively_chat_base()
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 8, "temperature": 0,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    told = []
    for device in ("cpu", "cuda"):
        base = wrap_model(tiny.model.to(device), tiny.tokenizer, "lively")
        engine = build_engine(base, heads=random_heads(base))
        with live_server(engine) as live, live.http() as http:
            reply = http.post("/v1/chat/completions", json={"model": live.model, **asked})
            told.append(reply.raise_for_status().json()["choices"][0])
    here, there = told
    assert there["message"] == here["message"]
    for one, other in zip(here["logprobs"]["content"], there["logprobs"]["content"], strict=True):
        assert other["token"] == one["token"]
        assert other["logprob"] == pytest.approx(one["logprob"], abs=1e-4)


def test_answers_under_a_grammar(cuda_stand_in: Device) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra `grammar`)")
    from support.serving.grammars import plain_under, tokenizer, writing_model

    from medusa_kit.settings.grammar import Grammar

    base = wrap_model(writing_model().to("cuda"), tokenizer(), "writing")
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY)
    grammar, prompt = Grammar.regex("(ab|ba)+[0-9]{2,9}"), tokenizer()("ab12 né").input_ids
    expected = plain_under(grammar, prompt, TOKENS)
    for drafter in ("none", "medusa", "suffix"):
        answer = engine.generate(prompt, grammar=grammar, drafter=drafter, max_new_tokens=TOKENS)
        assert answer.token_ids == expected, drafter
    assert cuda_stand_in.counts.launches.total() > 0


def test_a_lost_device_ends_the_batch(cuda_stand_in: Device) -> None:
    with engine_there().shared_batch(max_rows=2) as shared:
        answer = shared.submit(PROMPTS[0], max_new_tokens=100, drafter="suffix")
        for _ in answer.submission:  # it is under way
            cuda_stand_in.fail_for_good()
            break
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            answer.result()
        shared.close(timeout=30)
        assert "illegal memory access" in str(shared.ended)


def test_a_device_lost_between_answers_is_no_fault_of_a_request(cuda_stand_in: Device) -> None:
    """The request that finds it so raises what the device says, and ends the batch."""
    with engine_there().shared_batch(max_rows=2) as shared:
        shared.generate(PROMPTS[0], max_new_tokens=2, drafter="none")
        cuda_stand_in.fail_for_good()
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            shared.generate(PROMPTS[0], max_new_tokens=2, drafter="none")
        shared.close(timeout=30)
        assert "illegal memory access" in str(shared.ended)


def test_a_request_too_large_leaves_the_engine_alive(cuda_stand_in: Device) -> None:
    engine = engine_there()
    before = engine.generate(PROMPTS[0], max_new_tokens=TOKENS)
    cuda_stand_in.memory.free, cuda_stand_in.memory.largest = 7_000_000_000, 30_000
    with pytest.raises(DeviceMemoryError, match=r"7\.00 of 17\.18 GB are free"):
        engine.generate(PROMPTS[:2], max_new_tokens=100)
    cuda_stand_in.memory.largest = None
    assert engine.generate(PROMPTS[0], max_new_tokens=TOKENS).token_ids == before.token_ids
