"""Requests that do not come to their end: hang-ups, full queues, time limits, SIGTERM, failures.

A gate stands before each step of the batch, so that what happens between two steps is decided here.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.serving.live_server import LiveServer, live_server
from support.serving.waiting import until

from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.serve.service import Answers

LONG = 200
CHAT = "/v1/chat/completions"


class Gate:
    """Steps wait until so many have been let through."""

    def __init__(self) -> None:
        self.steps = threading.Semaphore(0)
        self.open = threading.Event()

    def wait(self) -> None:
        while not self.open.is_set() and not self.steps.acquire(timeout=0.01):
            pass


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, step = Gate(), Batch.step

    def held(batch: Batch) -> Any:
        gate.wait()  # the batch's thread steps only where it has rows
        return step(batch)

    monkeypatch.setattr(Batch, "step", held)
    yield gate
    gate.open.set()


@contextmanager
def held_server(gate: Gate, engine: Engine, **options: Any) -> Iterator[LiveServer]:
    """The gate opens before the server ends, which waits for its rows."""
    with live_server(engine, **options) as live, ExitStack() as end:
        end.callback(gate.open.set)
        yield live


def asked(live: LiveServer, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the sea?"}]
    return {"model": live.model, "messages": messages, "max_tokens": LONG, "temperature": 0,
            "logit_bias": {str(token): -100 for token in live.service.engine.base.stop_token_ids},
            **options}  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_place_within_a_step(
    gate: Gate, engine: Engine, stream: bool
) -> None:
    with held_server(gate, engine, max_rows=1) as live:
        service = live.service
        with live.http() as http:
            if stream:
                gate.steps.release(2)
                with http.stream("POST", CHAT, json=asked(live, stream=True)) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(CHAT, json=asked(live), timeout=0.3)
            until(lambda: service.idle)
            gate.steps.release(2)
            until(lambda: service.stats.running + service.stats.waiting == 0)
            gate.open.set()
            assert http.post(CHAT, json=asked(live, max_tokens=3)).status_code == 200


def test_the_step_in_which_a_client_hangs_up_is_counted(
    gate: Gate, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, cancel = list[Answers](), Answers.cancel

    def cancelled(answers: Answers) -> None:
        cancel(answers)
        told.append(answers)

    monkeypatch.setattr(Answers, "cancel", cancelled)
    with held_server(gate, engine, max_rows=1) as live, live.http() as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post(CHAT, json=asked(live), timeout=0.3)
        until(lambda: told)
        gate.open.set()
        until(lambda: told[0].answers[0].submission.done)
        decoded = len(told[0].answers[0].submission.request.token_ids)
        assert decoded > 0  # the step had begun
        for name in ("tokens", "accepted_tokens"):
            until(lambda name=name: counted(live, name) == decoded)  # type: ignore[misc]


def counted(live: LiveServer, name: str) -> float:
    families = text_string_to_metric_families(live.service.metrics.page().decode())
    return sum(
        one.value
        for family in families
        for one in family.samples
        if one.name == f"medusa_kit_{name}_total"
    )


def test_a_full_queue_refuses(gate: Gate, engine: Engine) -> None:
    with held_server(gate, engine, max_rows=1, max_queue=2) as live, live.http() as http:
        service, results = live.service, list[int]()
        threads = [threading.Thread(target=live_answer, args=(live, results)) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: sum(len(one.answers) for one in service._under_way) == 2)
        answer = http.post(CHAT, json=asked(live, n=2))  # the first of them finds a place
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["code"] == "queue_full"
        assert len(service._under_way) == 2
        gate.open.set()
        for thread in threads:
            thread.join()
        assert results == [200, 200]
        until(lambda: service.stats.running + service.stats.waiting == 0)
        assert http.post(CHAT, json=asked(live, max_tokens=2, n=3)).status_code == 200


def live_answer(live: LiveServer, results: list[int]) -> None:
    with live.http() as http:
        results.append(http.post(CHAT, json=asked(live, max_tokens=5)).status_code)


def test_a_request_that_takes_too_long(gate: Gate, engine: Engine) -> None:
    with held_server(gate, engine, request_timeout=0.2) as live:
        with live.http() as http:
            answer = http.post(CHAT, json=asked(live))
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        with live.client() as client, pytest.raises(openai.APIError, match="longer than"):
            list(client.chat.completions.create(stream=True, **asked(live)))
        gate.open.set()
        until(lambda: live.service.stats.running == 0)


def test_at_the_end_answers_under_way_finish_and_no_others_are_taken(
    gate: Gate, engine: Engine
) -> None:
    with held_server(gate, engine) as live:
        gate.steps.release(2)
        with live.http() as http, live.http() as other, ExitStack() as end:
            answer = end.enter_context(http.stream("POST", CHAT, json=asked(live, stream=True)))
            lines = answer.iter_lines()
            next(lines)
            live.server.drain()
            refused = other.post(CHAT, json=asked(live))
            assert refused.status_code == 503
            assert "Retry-After" in refused.headers
            assert live.thread.is_alive()
            gate.open.set()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        live.thread.join(30)
        assert not live.thread.is_alive()


def test_at_the_end_nothing_is_waited_for_longer_than_asked(gate: Gate, engine: Engine) -> None:
    with held_server(gate, engine, drain_timeout=0) as live, live.http() as http:
        gate.steps.release(2)
        with http.stream("POST", CHAT, json=asked(live, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.server.drain()
            rest = [line for line in lines if line]
        assert '"code":"closing"' in rest[-1]


def test_a_step_that_fails_harms_no_other_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live_server(engine, max_rows=2) as live, live.http() as http:
        monkeypatch.setattr(
            "medusa_kit.infer.decode.group.token_scores",
            lambda *_: (_ for _ in ()).throw(OSError("gone")),
        )
        bad = http.post(CHAT, json=asked(live, logprobs=True, max_tokens=4))
        assert bad.status_code == 500
        assert "gone" not in bad.text  # it may tell of the machine
        with live.client() as client, pytest.raises(openai.APIError):
            list(client.chat.completions.create(
                stream=True, logprobs=True, **asked(live, max_tokens=4)
            ))  # fmt: skip
        assert http.post(CHAT, json=asked(live, max_tokens=4)).status_code == 200
