"""The case that the doctor examines (a base that counts, its heads, and rows of data), and a server
that stands in for others.
"""

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.counting import counting_base, counting_rows, save_counting_heads
from support.serving.streaming_server import StreamingServer

from medusa_kit.base.model import BaseModel
from medusa_kit.bench.doctor import Case, examine


@pytest.fixture
def base() -> BaseModel:
    return counting_base()


@pytest.fixture
def heads(base: BaseModel, tmp_path: Path) -> Path:
    return save_counting_heads(base, tmp_path / "heads")


@pytest.fixture
def case(base: BaseModel, heads: Path) -> Case:
    return examine(base, counting_rows(), heads)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamingServer]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    stand_in = StreamingServer()
    yield stand_in
    stand_in.close()
