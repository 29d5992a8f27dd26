"""The front around two replicas in this process, as OpenAI's client sees it."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from support.serving.waiting import until

from medusa_kit.serve.operations.keys import ApiKeys
from medusa_kit.serve.replicated.front import Front
from medusa_kit.serve.replicated.relay import Forwarded
from medusa_kit.serve.replicated.replica import Replica, ReplicaState
from medusa_kit.serve.server import bind, server_for, url_of
from medusa_kit.settings.serve import ServeConfig

LOADING = {"model": "debug-tiny", "device": "cpu", "heads": None}
QUESTION: Any = [{"role": "user", "content": "What is the sea?"}]
KEY = "sk-test"


class LocalSource:
    def __init__(self, messages: Any) -> None:
        self._messages = messages
        self._closing: asyncio.Future[None] | None = None

    def __aiter__(self) -> Any:
        return self._messages

    def cancel(self) -> None:
        self._closing = asyncio.ensure_future(self._messages.aclose())


class LocalPool:
    """Replicas by turns."""

    lost: tuple[type[BaseException], ...] = ()

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self._turns = itertools.cycle(replicas)

    def ask(self, request: Forwarded) -> LocalSource:
        return LocalSource(next(self._turns).answer(request))

    async def states(self) -> list[ReplicaState]:
        return [replica.state() for replica in self.replicas]

    async def running(self) -> int:
        return len(self.replicas)


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    config = ServeConfig(replicas=2, max_rows=2)
    threads = 1
    pool = LocalPool([Replica(LOADING, config, ".", threads, name) for name in "ab"])
    yield pool
    for replica in pool.replicas:
        replica.service.close(drain=False)


@pytest.fixture
def front(pool: LocalPool) -> Front:
    config = ServeConfig(replicas=2, log_format="none", max_body=4096)
    return Front(pool, config, "debug-tiny", ApiKeys([KEY]))


@pytest.fixture
def url(front: Front) -> Iterator[str]:
    bound = bind("127.0.0.1", 0)
    bound.listen()
    server = server_for(front.app, front, lambda: None)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    yield url_of(bound)
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, timeout=60, headers=headers) as http:
        yield http


def test_answers_are_those_of_one_server(url: str, pool: LocalPool) -> None:
    engine = pool.replicas[0].service.engine
    wanted = engine.generate(QUESTION, max_new_tokens=8, drafter="none").text
    asked: Any = {"model": "debug-tiny", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        for _ in range(2):  # both replicas
            (choice,) = client.chat.completions.create(**asked).choices
            assert choice.message.content == wanted
            chunks = list(client.chat.completions.create(stream=True, **asked))
            assert "".join(one.choices[0].delta.content or "" for one in chunks) == wanted
        assert [one.id for one in client.models.list()] == ["debug-tiny"]
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.chat.completions.create(**{**asked, "model": "nobody"})


def test_the_front_has_the_keys_and_limits(url: str, http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    assert httpx.post(url + path, json={}).status_code == 401
    assert http.post(path, content=b"x" * 5000).status_code == 413
    assert httpx.get(url + "/health").json() == {"status": "ok", "replicas": 2}
    answer = http.get("/v1/models")
    assert len(answer.headers.get_list("x-request-id")) == 1


def test_the_batches_and_counters_of_all_replicas(http: httpx.Client) -> None:
    asked = {"model": "debug-tiny", "messages": QUESTION, "max_tokens": 4, "temperature": 0}
    for _ in range(2):
        assert http.post("/v1/chat/completions", json=asked).status_code == 200
    # Rows leave, and requests are counted, after their answers have been sent.
    until(lambda: http.get("/v1/batch").json()["rows"] == 0)
    batch = http.get("/v1/batch").json()
    assert (batch["max_rows"], batch["replicas"]) == (4, 2)
    route = 'medusa_kit_requests_total{route="/v1/chat/completions",status="200"} 2.0'
    until(lambda: route in http.get("/metrics").text.splitlines())
    lines = http.get("/metrics").text.splitlines()
    tokens = [line for line in lines if line.startswith("medusa_kit_tokens_total{")]
    assert {line.split('"')[1] for line in tokens} == {"a", "b"}
    assert len([line for line in lines if line.startswith("# HELP medusa_kit_tokens_total")]) == 1


def test_a_front_that_ends_takes_no_new_requests(front: Front, http: httpx.Client) -> None:
    front.closing = True
    answer = http.post("/v1/chat/completions", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "closing")
    assert http.get("/health").json()["status"] == "closing"


def test_a_replica_whose_batch_has_ended_is_not_healthy() -> None:
    replica = Replica(LOADING, ServeConfig(replicas=1), ".", 1, "c")
    replica.check_health()
    replica.service.close(drain=False)
    with pytest.raises(RuntimeError, match="closed"):
        replica.check_health()
