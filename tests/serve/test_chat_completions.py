"""Chats by OpenAI's own client: streamed and whole answers are plain transformers'."""

from typing import Any

import pytest
import torch
from openai import OpenAI
from support.callers import all_at_once
from support.serving.live_server import LiveServer

QUESTIONS = ["What is the sea?", "Count to ten.", "Why?", "Name a colour, please."]


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def plain_ids(live: LiveServer, question: str, tokens: int) -> list[int]:
    """By transformers' own generate, without the stop token."""
    base = live.service.engine.base
    ids_1T = torch.tensor([base.tokenizer.apply_chat_template(
        messages(question), add_generation_prompt=True, return_dict=False
    )])  # fmt: skip
    out_1T = base.model.generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=tokens, do_sample=False
    )
    new = out_1T[0, ids_1T.shape[1] :].tolist()
    return [token for token in new if token not in base.stop_token_ids]


def test_answers_to_concurrent_clients_are_plain_transformers(live: LiveServer) -> None:
    def ask(number: int) -> list[tuple[str, list[int]]]:
        """Streamed and whole, one after the other, each client the other way round."""
        asked: dict[str, Any] = {
            "model": live.model, "messages": messages(QUESTIONS[number]), "max_tokens": 24,
            "temperature": 0, "extra_body": {"return_token_ids": True},
        }  # fmt: skip
        answers = []
        with live.client() as client:
            for stream in (bool(number % 2), not number % 2):
                if stream:
                    chunks = list(client.chat.completions.create(stream=True, **asked))
                    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                    told = [chunk.choices[0].model_extra or {} for chunk in chunks]
                    ids = [token for one in told for token in one.get("token_ids", [])]
                else:
                    (choice,) = client.chat.completions.create(**asked).choices
                    text, ids = choice.message.content, choice.model_extra["token_ids"]
                answers.append((text, ids))
        return answers

    answers = all_at_once(ask, len(QUESTIONS))
    for question, (one, other) in zip(QUESTIONS, answers, strict=True):
        assert one == other
        assert one[1] == plain_ids(live, question, 24)
        assert one[0] == live.service.engine.base.tokenizer.decode(one[1], skip_special_tokens=True)
    assert len({text for (text, _), _ in answers}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_what_openai_s_client_expects(
    client: OpenAI, live: LiveServer, stream: bool
) -> None:
    asked: Any = {
        "model": live.model,
        "messages": messages("Why?"),
        "max_tokens": 5,
        "temperature": 0,
    }
    if stream:
        chunks = list(client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **asked
        ))  # fmt: skip
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [one.usage for one in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].choices == []
        reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
        assert len({chunk.id for chunk in chunks}) == 1
    else:
        answer = client.chat.completions.create(**asked)
        reason, usage = answer.choices[0].finish_reason, answer.usage
        assert answer.object == "chat.completion"
    assert reason == "length"
    assert usage.completion_tokens == 5
    assert usage.total_tokens == usage.prompt_tokens + 5
    told = usage.model_extra["medusa_kit"]
    assert told["acceptance_length"] == pytest.approx(4 / told["steps"])
    assert told["drafter"]


def test_the_models(client: OpenAI, live: LiveServer) -> None:
    assert [one.id for one in client.models.list()] == [live.model]
    with live.http() as http:
        assert http.get("/v1/models/").json() == http.get("/v1/models").json()
