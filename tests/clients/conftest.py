"""The embedded model behind the kit's server, and servers that refuse (`make test-clients`).

Each client has a file of its own, with the same questions in the same order.
"""

import os
from collections.abc import Callable, Iterator
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


@pytest.fixture
def nothing_runs(live: LiveServer) -> Callable[[], None]:
    """Waits until the server has no answer under way."""

    def rows() -> int:
        with live.http() as http:
            told = http.get("/v1/batch").json()
        return told["rows"] + told["reading"] + told["waiting"]

    return lambda: until(lambda: rows() == 0)


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
    stop = {str(token): -100 for token in live.service.engine.base.stop_token_ids}
    asked = {"model": live.model, "messages": STORY, "stream": True, "max_tokens": 4000}
    end = ExitStack()
    http = end.enter_context(live.http())
    path = "/v1/chat/completions"
    end.enter_context(http.stream("POST", path, json={**asked, "logit_bias": stop}))
    return end
