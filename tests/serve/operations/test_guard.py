"""Keys, limits, CORS, counters and the log around one app, and /health and /metrics."""

import io
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from medusa_kit.infer.decode.batches import BatchStats
from medusa_kit.serve.operations import logs
from medusa_kit.serve.operations.guard import guard, warn_of_open_server
from medusa_kit.serve.operations.health import operations
from medusa_kit.serve.operations.keys import ApiKeys
from medusa_kit.serve.operations.logs import LineWriter
from medusa_kit.serve.operations.metrics import AnswerClock, Metrics
from medusa_kit.settings.serve_limits import LimitOptions

KEY = {"Authorization": "Bearer sk-key"}
STATS = BatchStats(running=3, reading=1, waiting=5, steps=70, nodes=24, held_prefixes=2)


class Served:
    def __init__(self, keys: bool = False, **options: Any) -> None:
        self.reason: str | None = None
        self.metrics = Metrics(lambda: STATS)
        app = FastAPI()
        app.include_router(operations(self.metrics, lambda: self.reason))

        @app.post("/items/{item}")
        async def item(item: str, request: Request) -> int:
            if item == "full":
                return JSONResponse({}, 429)  # type: ignore[return-value]
            if item == "broken":
                raise RuntimeError
            return len(await request.body())

        guard(app, LimitOptions(**options), ApiKeys(["sk-key"]) if keys else None, self.metrics)
        self.client = TestClient(app, raise_server_exceptions=False)

    def samples(self) -> dict[tuple[str, ...], float]:
        return samples_of(self.client.get("/metrics", headers=KEY).text)


def samples_of(page: str) -> dict[tuple[str, ...], float]:
    return {
        (one.name.removeprefix("medusa_kit_"), *one.labels.values()): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
    }


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []

    class Writer:
        write = staticmethod(written.append)

    monkeypatch.setattr(logs, "stderr_writer", Writer)
    return written


@pytest.fixture
def served(lines: list[str]) -> Callable[..., Served]:
    return Served


def test_health_says_when_the_server_is_not_ready(served: Callable[..., Served]) -> None:
    one = served(keys=True)
    assert one.client.get("/health").json() == {"status": "ok"}
    assert one.client.head("/health").status_code == 200
    one.reason = "closing"
    answer = one.client.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "closing"})


def test_metrics_need_a_key_and_tell_of_the_batch(served: Callable[..., Served]) -> None:
    one = served(keys=True)
    assert one.client.get("/metrics").status_code == 401
    samples = one.samples()
    assert samples[("batch_running",)] == 3
    assert samples[("batch_waiting",)] == 5
    assert samples[("batch_nodes",)] == 24
    assert samples[("batch_steps_total",)] == 70


def test_requests_are_counted_by_route_not_by_path(served: Callable[..., Served]) -> None:
    one = served(max_body=10)
    for path, body in (("a", b""), ("b", b""), ("full", b""), ("broken", b""), ("c", b"0" * 11)):
        one.client.post(f"/items/{path}", content=body)
    for number in range(3):
        one.client.get(f"/made-up/{number}")
    samples = one.samples()
    counted = {key[1:]: value for key, value in samples.items() if key[0] == "requests_total"}
    assert counted == {
        ("/items/{item}", "200"): 2,
        ("/items/{item}", "429"): 1,
        ("/items/{item}", "500"): 1,
        ("other", "413"): 1,  # refused before there was a route
        ("other", "404"): 3,
    }
    assert samples[("queue_refusals_total",)] == 1


def test_two_servers_in_a_process_count_apart(served: Callable[..., Served]) -> None:
    first, second = served(), served()
    first.client.post("/items/a")
    assert ("requests_total", "/items/{item}", "200") in first.samples()
    assert ("requests_total", "/items/{item}", "200") not in second.samples()


def test_guesses_beyond_the_end_of_an_answer_are_none_of_its_tokens() -> None:
    metrics = Metrics()
    AnswerClock(metrics, 0.0).accepted(2, 5)
    samples = samples_of(metrics.page().decode())
    depths = {key[1]: value for key, value in samples.items() if key[0] == "accepted_tokens_total"}
    assert depths == {"1": 1, "2": 1}


def test_an_answer_is_timed_by_its_steps() -> None:
    metrics, times = Metrics(), iter([10.5, 10.9, 11.0])
    clock = AnswerClock(metrics, 10.0, lambda: next(times))
    clock.prompt(20, 15)
    for tokens, guessed in ((1, 0), (4, 3), (20, 20)):  # those of the second took 0.1 s each
        clock.stamp(tokens)
        clock.accepted(tokens, guessed)
    clock.stamp(0)  # the end
    clock.settle()
    clock.settle()
    samples = samples_of(metrics.page().decode())
    assert samples[("time_to_first_token_seconds_sum",)] == 0.5
    assert samples[("time_between_tokens_seconds_count",)] == 24
    assert samples[("time_between_tokens_seconds_sum",)] == pytest.approx(0.5)
    assert samples[("tokens_total",)] == 25
    depths = {key[1]: value for key, value in samples.items() if key[0] == "accepted_tokens_total"}
    assert depths == {"0": 2, "1": 2, "2": 2, "3": 2, **dict.fromkeys(map(str, range(4, 16)), 1),
                      "16": 5}  # fmt: skip
    assert samples[("cached_tokens_total",)] == 15


def test_pages_elsewhere_may_not_call_unless_told(served: Callable[..., Served]) -> None:
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in served().client.get("/health", headers=asks).headers
    told = served(keys=True, cors_origin="https://a.example")
    allowed = told.client.options("/items/a", headers=asks)  # a browser sends no key with this
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = told.client.post("/items/a", headers=asks)  # the page can read why
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    other = told.client.options("/items/a", headers={**asks, "Origin": "https://b.example"})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


def test_each_request_has_a_line_without_what_is_private(
    served: Callable[..., Served], lines: list[str]
) -> None:
    one = served(keys=True, log_format="json")
    answer = one.client.post("/items/a?secret=1", headers=KEY, content=b"secret")
    one.client.post("/items/x%0Ay", headers={"Authorization": "Bearer secret"})
    first, second = map(json.loads, lines)
    assert first["id"] == answer.headers["x-request-id"]
    assert (first["method"], first["path"], first["status"]) == ("POST", "/items/a", 200)
    assert second["status"] == 401
    assert "secret" not in "".join(lines)
    assert "sk-key" not in "".join(lines)


def test_plain_lines_are_one_line_each_and_none_is_none(
    served: Callable[..., Served], lines: list[str]
) -> None:
    served().client.post("/items/x%0Ay")
    served(log_format="none").client.post("/items/a")
    (line,) = lines
    assert " POST /items/x\\ny 200 " in line


class Full(io.StringIO):
    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_under_the_log_loses_lines_only() -> None:
    stream = Full()
    writer = LineWriter(stream)
    writer.write("lost")
    while not writer.written_or_lost:
        time.sleep(0.001)
    stream.full = False
    writer.write("kept")
    writer.close()
    assert stream.getvalue() == "1 lines could not be written\nkept\n"


def test_a_log_that_nobody_reads_does_not_hold_up_requests() -> None:
    release = threading.Event()

    class Stalled(io.StringIO):
        def write(self, text: str) -> int:
            release.wait()
            return super().write(text)

    stream = Stalled()
    writer = LineWriter(stream, max_lines=4)
    for number in range(100):
        writer.write(str(number))
    release.set()
    writer.write("last")
    writer.close()
    assert len(stream.getvalue().splitlines()) < 10


def test_a_closed_stderr_loses_lines_only() -> None:
    stream = io.StringIO()
    stream.close()
    writer = LineWriter(stream)
    writer.write("lost")
    writer.close()
    assert not writer.alive


def test_a_server_open_to_all_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_open_server("127.0.0.1", None)
    warn_of_open_server("0.0.0.0", ApiKeys(["k"]))
    assert capsys.readouterr().err == ""
    warn_of_open_server("0.0.0.0", None)
    assert "asks for no key" in capsys.readouterr().err
