"""The embedded model behind the kit's server, and servers that refuse (`make test-clients`).

Each client has a file of its own, with the same questions in the same order.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched
os.environ["LANGSMITH_TRACING"] = "false"

import pytest
from support.serving.live_server import LiveServer, live_server
from support.serving.waiting import until

import medusa_kit
from medusa_kit.engine.engine import Engine
from medusa_kit.serve.operations.keys import ApiKeys

KEY = "sk-right"
LONG = 4000  # tokens
STORY = [{"role": "user", "content": "Tell me a long story of the sea."}]


@pytest.fixture(scope="session")
def engine() -> Engine:
    return medusa_kit.load("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def live(engine: Engine) -> Iterator[LiveServer]:
    with live_server(engine, max_rows=2) as server:
        yield server


@pytest.fixture
def url(live: LiveServer) -> str:
    return f"{live.url}/v1"


def endless(live: LiveServer) -> dict[str, Any]:
    """What makes an answer a long one."""
    stops = live.service.engine.base.stop_token_ids
    return {"max_tokens": LONG, "logit_bias": {str(token): -100 for token in stops}}


@pytest.fixture(name="endless")
def _endless(live: LiveServer) -> dict[str, Any]:
    return endless(live)


@pytest.fixture
def ends_early(live: LiveServer) -> Iterator[None]:
    """Checks that an answer that was begun meanwhile has come to an end, not to its own."""

    def told(name: str) -> int:
        with live.http() as http:
            page = http.get("/metrics").text.splitlines()
        (line,) = (line for line in page if line.startswith(f"medusa_kit_{name} "))
        return int(float(line.split()[1]))

    before = told("tokens_total")
    yield
    until(lambda: told("batch_running") + told("batch_waiting") == 0)
    assert 0 < told("tokens_total") - before < LONG


@pytest.fixture(params=[401, 404, 429, 503])
def refusing(
    request: pytest.FixtureRequest, engine: Engine, live: LiveServer
) -> Iterator[tuple[int, str, str]]:
    """(status, URL, model) of what will be refused so."""
    status, model = request.param, live.model
    with ExitStack() as end:
        if status == 401:
            live = end.enter_context(live_server(engine, app={"keys": ApiKeys([KEY])}))
        elif status == 404:
            model = "another"
        elif status == 429:
            live = end.enter_context(live_server(engine, max_rows=1, max_queue=1))
            for _ in range(2):
                end.enter_context(_under_way(live))
            until(lambda: live.service.stats.running + live.service.stats.waiting == 2)
        else:
            live = end.enter_context(live_server(engine))
            live.service.closing = True
        yield status, f"{live.url}/v1", model


def _under_way(live: LiveServer) -> Any:
    """An answer that nobody reads."""
    asked = {"model": live.model, "messages": STORY, "stream": True, **endless(live)}
    end = ExitStack()
    http = end.enter_context(live.http())
    path = "/v1/chat/completions"
    end.enter_context(http.stream("POST", path, json=asked))
    return end
