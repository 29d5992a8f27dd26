"""What requests may ask for beside tokens, within int16 and int8: grammars, stops, draws, streams,
conversations, and all of it through the server. The text is plain decoding's in the same precision.

Shapes: V vocabulary.
"""

import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from support.callers import all_at_once
from support.kernels.rounded import PRECISIONS, multiplies_integers, next_logits, some
from support.serving.grammars import PADDED, STOPS, allowed_after, tokenizer
from support.small_engines import BUSHY, build_engine, random_heads
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.serve.app import create_app
from medusa_kit.serve.service import Service
from medusa_kit.settings.grammar import Grammar
from medusa_kit.settings.serve import ServeConfig

pytestmark = pytest.mark.skipif(not multiplies_integers(), reason="no integers are multiplied here")
SCHEMA = {
    "type": "object", "required": ["name", "n"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 5},
                   "n": {"type": "integer", "minimum": 0, "maximum": 99}},
}  # fmt: skip
GRAMMARS = {
    "schema": Grammar.json_schema({**SCHEMA, "x-guidance": {"whitespace_flexible": False}}),
    "regex": Grammar.regex("(ab|ba)+[0-9]{2,9}"),
    "choices": Grammar.choices(['say "ab"', "say \\ no", "né\n"]),
}
DRAFTERS = ("auto", "medusa", "suffix", "recycling", "draft-model")
CASES = list(itertools.product(PRECISIONS, DRAFTERS))
PROMPTS = ['{"name":"abab","n":12}' * 2, "(([ab])) ab12 né"]
TOKENS = 60


def writing_model() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "vocab_size": PADDED}
    model = tiny_model("llama", max_position_embeddings=512, **sizes)
    model.generation_config.eos_token_id = STOPS
    return model


@functools.cache
def engine_for(activations: str, drafter: str | None = None) -> Engine:
    """Of `drafter` alone, without anything that is kept, or with heads and a draft model."""
    base = wrap_model(writing_model(), tokenizer(), "writing")
    given: dict[str, Any] = {"weights": "int8", "activations": activations}
    if drafter is not None:
        return build_engine(base, drafter=drafter, prefix_cache="off", **given)
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, **given)
    engine.draft_model = wrap_model(writing_model(), tokenizer(), "the same")
    return engine


@functools.cache
def prompts() -> list[list[int]]:
    return [tokenizer()(text).input_ids for text in PROMPTS]


@functools.cache
def under(activations: str, kind: str, number: int) -> list[int]:
    """The greedy answer with one node a step, masked by llguidance itself."""
    verifier, prompt = engine_for(activations).verifier, prompts()[number]
    cache, answer = verifier.new_cache(1, len(prompt) + TOKENS), list[int]()
    with torch.inference_mode():
        for token in prompt[:-1]:
            next_logits(verifier, cache, token)
        while len(answer) < TOKENS and (answer[-1:] or [0])[0] not in STOPS:
            logits_V = next_logits(verifier, cache, [*prompt[-1:], *answer][-1])
            allowed = torch.tensor(sorted(allowed_after(GRAMMARS[kind], answer)))
            answer.append(int(allowed[logits_V[allowed].argmax()]))
    return answer


@pytest.mark.parametrize(("activations", "name"), some(CASES, 2))
def test_grammars(activations: str, name: str) -> None:
    engine, plain = engine_for(activations), engine_for(activations, "none")
    for kind, grammar in GRAMMARS.items():
        given: dict[str, Any] = {"grammar": grammar, "max_new_tokens": TOKENS}
        results = engine.generate(prompts(), drafter=name, **given)
        expected = [under(activations, kind, number) for number in range(len(PROMPTS))]
        assert [result.token_ids for result in results] == expected, kind
        drawn = {**given, "temperature": 1.2, "top_k": 30, "seed": 3}
        found = engine.generate(prompts(), drafter=name, **drawn)
        alone = [plain.generate(prompt, **drawn).token_ids for prompt in prompts()]
        assert [result.token_ids for result in found] == alone, kind


@pytest.mark.parametrize(("activations", "name"), some(CASES, 2))
def test_stops_draws_and_streams(activations: str, name: str) -> None:
    """Penalties and a bias make logits depend on the path; stop strings may end within a draft."""
    engine, plain = engine_for(activations), engine_for(activations, "none")
    asked: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {5: -3.0, 9: 2.0}},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02, "seed": 7, "frequency_penalty": 0.3},
        {"temperature": 2.0, "seed": 8},
    ]
    for options in asked:
        whole = plain.generate(PROMPTS[0], max_new_tokens=TOKENS, **options)
        middle = whole.text[len(whole.text) // 2 :][:2]
        for stop in (None, [middle] if middle else None):
            given = {"max_new_tokens": TOKENS, "stop": stop, **options}
            expected = plain.generate(PROMPTS[0], **given)
            found = engine.generate(PROMPTS[0], drafter=name, **given)
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            streaming = engine.stream(PROMPTS[0], drafter=name, **given)
            assert "".join(streaming) == expected.text
            assert streaming.result.token_ids == expected.token_ids


@pytest.mark.parametrize("activations", PRECISIONS)
def test_conversations(activations: str) -> None:
    told = [engine_for(activations).conversation(), engine_for(activations, "none").conversation()]
    for text in ("ab ab ab", "(ab) 12", "né"):
        answers = [one.send(text, max_new_tokens=24).token_ids for one in told]
        assert answers[0] == answers[1]
    assert told[0].prompt_ids == told[1].prompt_ids


@pytest.fixture(params=PRECISIONS)
def clients(request: pytest.FixtureRequest) -> Iterator[list[TestClient]]:
    """Of a server that drafts, with fewer rows than requests, and of a plain one."""
    engines = engine_for(request.param), engine_for(request.param, "none")
    options: Any = {"log_format": "none", "max_queue": 64}
    services = [
        Service(engine, ServeConfig(max_rows=rows, **options))
        for engine, rows in zip(engines, (3, 1), strict=True)
    ]
    with (
        TestClient(create_app(services[0]), "http://localhost") as drafting,
        TestClient(create_app(services[1]), "http://localhost") as plain,
    ):
        yield [drafting, plain]
    for service in services:
        service.close(drain=False)


def bodies() -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": text} for text in (*PROMPTS, "ab", "12 ab 12 ab 12")]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    options: list[dict[str, Any]] = [
        {}, {"response_format": schema}, {"temperature": 0.8, "seed": 5}, {"stop": ["a", "}"]},
        {"temperature": 1.1, "seed": 6, "response_format": schema}, {"logprobs": True,
                                                                    "top_logprobs": 2},
    ]  # fmt: skip
    return [
        {"model": "writing", "messages": [message], "max_completion_tokens": 40,
         "temperature": 0, **more}
        for message, more in itertools.product(messages, options)
    ]  # fmt: skip


def streamed(client: TestClient, body: dict[str, Any]) -> str:
    text = client.post("/v1/chat/completions", json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") for event in events for choice in event["choices"]]
    return "".join(delta or "" for delta in deltas)


def test_the_server_answers_as_one_that_decodes_plainly(clients: list[TestClient]) -> None:
    """Requests come at once, whole and streamed; log-probabilities have the same digits."""
    drafting, plain = clients
    asked = some(bodies(), 6)
    whole = all_at_once(
        lambda n: [drafting.post("/v1/chat/completions", json=one) for one in asked[n::4]], 4
    )
    for number, answers in enumerate(whole):
        for body, answer in zip(asked[number::4], answers, strict=True):
            assert answer.status_code == 200, answer.text
            expected = plain.post("/v1/chat/completions", json=body).json()["choices"]
            assert answer.json()["choices"] == expected
            if "logprobs" not in body:
                assert streamed(drafting, body) == (expected[0]["message"]["content"] or "")


def test_the_prompts_are_worth_the_test() -> None:
    """Answers end by themselves, drafts are accepted, and precisions differ."""
    answer = tokenizer().decode(under("int16", "schema", 0)[:-1])
    assert set(json.loads(answer)) == {"name", "n"}
    result = engine_for("int16").generate(prompts()[0], drafter="draft-model", max_new_tokens=40)
    assert result.stats.acceptance_length > 1.2
    said = {
        one: [
            engine_for(one, "none").generate(prompts()[0], temperature=1.0, seed=seed).token_ids
            for seed in range(4)
        ]
        for one in PRECISIONS
    }
    assert said["int16"] != said["int8"]
