"""What a request may ask for: each answer is the one that `Engine.generate` gives."""

from typing import Any

import pytest
import torch
from openai import OpenAI
from support.serving.live_server import LiveServer
from transformers import GenerationConfig

from medusa_kit.engine.engine import Engine

QUESTION = [{"role": "user", "content": "What is the sea?"}]


def chat(client: OpenAI, live: LiveServer, **options: Any) -> Any:
    asked = {"model": live.model, "messages": QUESTION, "max_tokens": 12, **options}
    return client.chat.completions.create(**asked)


def ids_of(choice: Any) -> list[int]:
    return list(choice.model_extra["token_ids"])


def wanted(engine: Engine, prompt: Any = QUESTION, **options: Any) -> list[int]:
    answer = engine.generate(prompt, **{"max_new_tokens": 12, "drafter": "none", **options})
    return [token for token in answer.token_ids if token not in engine.base.stop_token_ids]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0, "top_p": 0.5, "extra_body": {"top_k": 2, "min_p": 0.5}}, {}),
        ({"seed": 3}, {}),  # greedy, as the model's own config asks for no sampling
        ({"seed": 3, "top_p": 0.8}, {"seed": 3, "temperature": 1.0, "top_p": 0.8}),
        ({"seed": 3, "top_p": 1.0, "extra_body": {"top_k": -1}}, {}),
        ({"seed": 3, "temperature": 0.7, "top_p": 0.8, "extra_body": {"top_k": 9, "min_p": 0.01}},
         {"seed": 3, "temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.01}),
        ({"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 1.0},
         {"frequency_penalty": 1.5, "presence_penalty": 1.0}),
        ({"temperature": 0, "extra_body": {"repetition_penalty": 1.7}},
         {"repetition_penalty": 1.7}),
        ({"temperature": 0, "logit_bias": {"70": 30}}, {"logit_bias": {70: 30.0}}),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_sampling(
    client: OpenAI, live: LiveServer, asked: dict[str, Any], meant: dict[str, Any]
) -> None:
    extra = {"return_token_ids": True, **asked.pop("extra_body", {})}
    (choice,) = chat(client, live, extra_body=extra, **asked).choices
    assert ids_of(choice) == wanted(live.service.engine, **meant)


def test_the_model_s_own_sampling_is_the_default(
    client: OpenAI, live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = GenerationConfig(do_sample=True, temperature=0.7, top_k=9, top_p=0.8)
    monkeypatch.setattr(live.service.engine.base.model, "generation_config", own)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8}),
        ({"temperature": 1.5}, {"temperature": 1.5, "top_k": 9, "top_p": 0.8}),
        ({"top_p": 1.0, "extra_body": {"top_k": -1}}, {"temperature": 0.7}),
        ({"temperature": 0}, {}),
    ]
    for asked, meant in cases:
        extra = {"return_token_ids": True, **asked.pop("extra_body", {})}
        (choice,) = chat(client, live, extra_body=extra, seed=3, **asked).choices
        assert ids_of(choice) == wanted(live.service.engine, seed=3, **meant), meant


def test_several_answers_have_seeds_of_their_own(client: OpenAI, live: LiveServer) -> None:
    answer = chat(client, live, n=3, seed=7, extra_body={"return_token_ids": True})
    expected = [wanted(live.service.engine, temperature=1.0, seed=7 + i) for i in range(3)]
    assert [ids_of(choice) for choice in answer.choices] == expected
    assert len({tuple(ids) for ids in expected}) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    stats = live.service.engine.generate(QUESTION, max_new_tokens=1).stats
    assert answer.usage.prompt_tokens == stats.prompt_tokens  # counted once


def test_answers_without_a_seed_differ(client: OpenAI, live: LiveServer) -> None:
    texts = {chat(client, live, temperature=1).choices[0].message.content for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: OpenAI, live: LiveServer, stream: bool) -> None:
    whole = live.service.engine.generate(QUESTION, max_new_tokens=12).text
    stop = whole[3:5]
    got = chat(client, live, temperature=0, stop=[stop, "never"], stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in got]
        text, reason = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
    else:
        text, reason = got.choices[0].message.content, got.choices[0].finish_reason
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"


def test_max_completion_tokens(client: OpenAI, live: LiveServer) -> None:
    asked: Any = {"model": live.model, "messages": QUESTION, "temperature": 0}
    answer = client.chat.completions.create(max_completion_tokens=4, **asked)
    assert answer.usage.completion_tokens == 4


def test_completions_take_text_ids_and_lists_of_them(client: OpenAI, live: LiveServer) -> None:
    engine = live.service.engine
    texts = ["the sea", "a"]
    ids = [list(engine.base.tokenizer(text).input_ids) for text in texts]
    asked: Any = {"model": live.model, "temperature": 0, "max_tokens": 6,
                  "extra_body": {"return_token_ids": True}}  # fmt: skip
    for prompt, several in ((texts[0], ids[:1]), (texts, ids), (ids[1], ids[1:]), (ids, ids)):
        answer = client.completions.create(prompt=prompt, **asked)
        expected = [wanted(engine, one, max_new_tokens=6) for one in several]
        assert [ids_of(choice) for choice in answer.choices] == expected
        streamed: dict[int, str] = {}
        for chunk in client.completions.create(prompt=prompt, stream=True, **asked):
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + choice.text
        assert [streamed[i] for i in range(len(several))] == [c.text for c in answer.choices]


@pytest.mark.parametrize("drafter", ["none", "medusa"])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_the_base_model_s(
    client: OpenAI, live: LiveServer, stream: bool, drafter: str
) -> None:
    base = live.service.engine.base
    extra = {"return_token_ids": True, "medusa_kit": {"drafter": drafter}}
    got = chat(client, live, temperature=0, logprobs=True, top_logprobs=3, stream=stream,
               presence_penalty=1.0, extra_body=extra)  # fmt: skip
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    ids = [token for choice in choices for token in (choice.model_extra or {}).get("token_ids", [])]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    prompt = live.service.engine.encode(QUESTION)
    with torch.no_grad():
        log_TV = base.model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    assert len(entries) == len(ids) > 0
    for place, (token, entry) in enumerate(zip(ids, entries, strict=True), start=len(prompt) - 1):
        assert entry.token == base.tokenizer.decode([token])
        assert entry.logprob == pytest.approx(float(log_TV[place, token]), abs=1e-4)
        best = log_TV[place].topk(3).values.tolist()
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(best, abs=1e-4)


def test_log_probabilities_of_completions(client: OpenAI, live: LiveServer) -> None:
    asked: Any = {"model": live.model, "prompt": "the sea", "temperature": 0, "max_tokens": 6}
    (whole,) = client.completions.create(logprobs=2, **asked).choices
    told = whole.logprobs
    assert "".join(told.tokens[:1]) == told.tokens[0]
    assert told.text_offset[0] == 0
    assert [len(one) for one in told.top_logprobs] == [2] * len(told.tokens)
    chunks = list(client.completions.create(logprobs=2, stream=True, **asked))
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [o for one in streamed for o in one.text_offset] == told.text_offset
    assert [p for one in streamed for p in one.token_logprobs] == pytest.approx(told.token_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_who_guessed_what(client: OpenAI, live: LiveServer, stream: bool) -> None:
    """A prompt that holds its own answer is guessed right by looking it up."""
    engine = live.service.engine
    prompt = list(engine.encode(QUESTION))
    answer = wanted(engine, prompt, max_new_tokens=10)
    prompt += [*answer, *prompt]
    extra = {"medusa_kit": {"spans": True, "tree": True, "drafter": "prompt-lookup"},
             "return_token_ids": True}  # fmt: skip
    got = client.completions.create(
        model=live.model, prompt=prompt, temperature=0, max_tokens=40, stream=stream,
        extra_body=extra,
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    told = [choice.model_extra["medusa_kit"] for choice in choices]
    spans = [span for one in told for span in one["spans"]]
    assert "".join(span["text"] for span in spans) == "".join(choice.text for choice in choices)
    assert all((span["depth"] == 0) == (span["by"] is None) for span in spans)
    assert {span["by"] for span in spans} <= {None, "prompt-lookup"}
    assert max(span["depth"] for span in spans) > 1
    trees = [one["tree"] for one in told if one["tree"]]
    assert trees[-1]["parents"][0] == -1
    assert len(trees[-1]["tokens"]) == len(trees[-1]["parents"])
    for tree in trees:
        assert set(tree["accepted"]) <= set(range(1, len(tree["parents"])))
    steps = [c.model_extra["token_ids"] for c in choices] if stream else []
    for ids, tree in zip(steps[1:], (one["tree"] for one in told[1:]), strict=True):
        if tree is not None and ids:  # the accepted nodes come first, then the next root
            taken = [tree["tokens"][node] for node in tree["accepted"]]
            assert ids[: len(taken)] == taken
