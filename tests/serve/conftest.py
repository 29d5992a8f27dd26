"""One server of a tiny chat model for the tests that only ask it."""

from collections.abc import Iterator

import pytest
from openai import OpenAI
from support.checked_once import checked_once  # noqa: F401
from support.serving.live_server import LiveServer, live_server
from support.small_engines import build_engine, lively_chat_base, random_heads

from medusa_kit.engine.engine import Engine


@pytest.fixture(scope="session")
def engine() -> Engine:
    base = lively_chat_base()
    return build_engine(base, heads=random_heads(base))


@pytest.fixture(scope="session")
def live(engine: Engine) -> Iterator[LiveServer]:
    with live_server(engine, max_rows=4, max_queue=16) as server:
        yield server


@pytest.fixture
def client(live: LiveServer) -> Iterator[OpenAI]:
    with live.client() as client:
        yield client
