"""A server under load: arrivals on a made-up clock, figures of made-up records, a stand-in."""

import json
import threading
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from support.serving.live_server import live_server
from support.serving.streaming_server import StreamingServer
from support.small_engines import build_engine, lively_chat_base, random_heads

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.bench.endpoint import Question
from medusa_kit.bench.load.arrivals import Closed, Poisson
from medusa_kit.bench.load.records import (
    RequestRecord,
    answered,
    most_at_once,
    percentiles,
    summary,
)
from medusa_kit.bench.load.report import notes
from medusa_kit.bench.load.run import LoadRun, PlainAnswers
from medusa_kit.distill.openai_client import Endpoint
from medusa_kit.distill.openai_stream import Arrived, Streamed, stream_answer
from medusa_kit.errors import MedusaKitError


def questions(count: int) -> list[Question]:
    return [Question(n, [{"role": "user", "content": f"q{n}"}]) for n in range(1, count + 1)]


def load_run(server: StreamingServer, count: int, **options: Any) -> LoadRun:
    endpoint = Endpoint(server.url, "served", first_wait_seconds=0.0, return_token_ids=True)
    return LoadRun(endpoint, questions(count), byte_tokenizer, **options)


# When requests are sent.


class Clock:
    """Time that passes where somebody waits, and while a request is sent."""

    def __init__(self) -> None:
        self.now, self.waits = 100.0, list[float]()

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def test_poisson_arrivals_are_those_of_the_seed() -> None:
    times = Poisson(4.0, seed=3).times(20000)
    assert times == Poisson(4.0, seed=3).times(20000)
    assert times != Poisson(4.0, seed=4).times(20000)
    assert times[:5] == Poisson(4.0, seed=3).times(5)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert min(gaps) > 0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, rel=0.03)
    within_the_mean = sum(gap < 1 / 4 for gap in gaps) / len(gaps)
    assert within_the_mean == pytest.approx(0.632, abs=0.02), "1 - 1/e: no even spacing"


def test_requests_start_when_they_arrive_though_none_has_ended() -> None:
    clock, together = Clock(), threading.Barrier(5)
    load = Poisson(2.0, 1, lambda: clock.now, clock.wait)

    def ask(question: int, due: float) -> tuple[int, float]:
        together.wait(5)
        return question, due

    sent = load.run(range(5), ask, 100.0)
    assert [number for number, _ in sent] == list(range(5))
    assert [due - 100.0 for _, due in sent] == pytest.approx(load.times(5))
    assert sum(clock.waits) == pytest.approx(load.times(5)[-1])


def test_a_request_that_is_sent_late_was_due_when_it_arrived() -> None:
    clock = Clock()
    clock.now += 1000.0  # the client was held up
    load = Poisson(2.0, 1, lambda: clock.now, clock.wait)
    due = load.run(range(3), lambda _, due: due, 100.0)
    assert clock.waits == []
    assert due == pytest.approx([100.0 + after for after in load.times(3)])


@pytest.mark.parametrize("clients", [1, 3])
def test_so_many_clients_take_turns(clients: int) -> None:
    together, lock, running, most = threading.Barrier(clients), threading.Lock(), 0, 0

    def ask(question: int, due: float) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(5)
        with lock:
            running -= 1
        return question

    assert Closed(clients).run(range(6), ask, 0.0) == list(range(6))
    assert most == clients


# Figures.


def streamed(pieces: list[tuple[float, tuple[int, ...]]], **options: Any) -> Streamed:
    arrived = tuple(Arrived(at, ids) for at, ids in pieces)
    return Streamed("ab", "length", 10.0, arrived[0].at, 20.0, pieces=arrived, **options)


def test_percentiles() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([float(value) for value in range(100, -1, -1)]) == pytest.approx(
        {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    )


def test_a_piece_of_several_tokens_shares_its_wait() -> None:
    got = streamed([(11.0, (1,)), (14.0, (2, 3, 4)), (15.0, (5,))])
    record = answered(1, got, 5, 9.5, 9.0)
    assert record.waits() == [3.0, 1.0]
    assert record.token_times() == [1.0, 1.0, 1.0, 1.0]
    assert (record.arrival, record.started, record.first_token) == (0.5, 1.0, 2.0)


def test_pieces_whose_tokens_are_not_told_have_as_many() -> None:
    record = answered(1, streamed([(11.0, ()), (13.0, ())]), 4, 9.0, 9.0)
    assert record.token_times() == [1.0, 1.0]
    assert record.token_ids is None


def test_the_figures_of_several_requests() -> None:
    def record(number: int, arrival: float, ended: float, **options: Any) -> RequestRecord:
        return RequestRecord(number, arrival, arrival + 0.5, ended, **options)

    records = [
        record(1, 0.0, 4.0, first_token=1.0, tokens=30, steps=10, acceptance_length=2.0, same=True),
        record(2, 1.0, 5.0, first_token=4.0, tokens=10, steps=30, acceptance_length=1.0,
               same=False, cached_tokens=7),
        record(3, 2.0, 2.6, error="the server answers 429"),
    ]  # fmt: skip
    found = summary(records)
    assert (found["requests"], found["answered"], found["failed"]) == (3, 2, 1)
    assert (found["tokens"], found["seconds"]) == (40, 5.0)
    assert (found["tokens_per_second"], found["answers_per_second"]) == (8.0, 0.4)
    assert found["first_token_seconds"]["p50"] == 2.0, "of 1 and 3, from when each was due"
    assert found["acceptance_length"] == 1.25, "over steps, not answers"
    assert (found["same"], found["compared"], found["differing"]) == (1, 2, [2])
    assert (found["most_at_once"], found["cached_tokens"]) == (3, 7)
    assert summary([])["tokens_per_second"] == 0.0


def test_one_that_ends_as_another_starts_is_not_beside_it() -> None:
    records = [RequestRecord(n, n, n, n + 1) for n in range(3)]
    assert most_at_once(records) == 1


# A whole run.


def test_every_request_is_recorded(server: StreamingServer) -> None:
    server.token_ids = [[83], [1, 2], [3, 256]]
    server.cut = {"q2"}
    server.refuse = lambda number, question: 429 if question == "q3" else None
    run = load_run(server, 4)
    point = run.measure(Closed(2)).as_dict()
    assert (point["concurrency"], point["answered"], point["failed"]) == (2, 2, 2)
    assert point["tokens"] == 10
    assert sorted(server.questions) == ["q1", "q2", "q3", "q4"], "none is sent again"
    told = run.as_dict()
    assert server.url not in json.dumps(told)
    first, second, third, _ = told["points"][0]["requests_made"]
    assert [tokens for _, tokens in first["pieces"]] == [1, 2, 2]
    assert first["arrival"] <= first["started"] <= first["first_token"] <= first["ended"]
    assert (first["tokens"], first["finish_reason"], first["error"]) == (5, "stop", None)
    assert "breaks off" in second["error"]
    assert "answers 429" in third["error"]


def test_requests_that_arrive_do_not_wait_for_others(server: StreamingServer) -> None:
    together = threading.Barrier(3)
    server.hold = lambda question: (together.wait(5), None)[1]
    point = load_run(server, 3).measure(Poisson(1000.0)).as_dict()
    assert (point["rate"], point["answered"]) == (1000.0, 3)
    assert server.most_running == 3


def test_answers_are_compared_with_plain_ones(server: StreamingServer) -> None:
    server.token_ids = [[83], [1, 2], [3, 256]]
    texts = {n: "to you!" for n in (1, 2)}
    plain = PlainAnswers({1: [83, 1, 2, 3], 2: [83, 1, 2, 4]}, texts, frozenset({256}))
    run = load_run(server, 2, plain=plain)
    point = run.measure(Closed(1)).as_dict()
    assert (point["same"], point["compared"], point["differing"]) == (1, 2, [2])
    assert run.compared_by == "token ids"
    server.token_ids = None
    run = load_run(server, 2, plain=plain)
    assert run.measure(Closed(1)).as_dict()["same"] == 2
    assert run.compared_by == "text"
    assert run.as_dict()["activations"] == "float32"
    for precision, told in (("float32", "the base here, by text"),
                            ("int8", "the base here with int8 activations, by text")):  # fmt: skip
        run.plain = replace(plain, activations=precision)
        assert told in " ".join(notes(run, [point.as_dict() for point in run.points]))


def test_tokens_without_usage(server: StreamingServer) -> None:
    server.usage = False
    assert load_run(server, 1).measure(Closed(1)).records[0].tokens == len("to you!") + 1
    server.token_ids = [[83], [1, 2], [3, 256]]
    assert load_run(server, 1).measure(Closed(1)).records[0].tokens == 5


def test_a_server_that_answers_nothing(server: StreamingServer) -> None:
    run = load_run(server, 2)
    run.measure(Closed(1))
    server.refuse = lambda number, question: 503
    assert run.measure(Closed(2)).as_dict()["failed"] == 2, "it did answer before"
    with pytest.raises(MedusaKitError, match=r"answers no request: .*answers 503"):
        load_run(server, 2).measure(Closed(1))


def test_our_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are plain decoding's, its pieces have tokens, and usage tells the acceptance."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    base = lively_chat_base()
    engine = build_engine(base, heads=random_heads(base))
    asked = questions(4)
    with live_server(engine, max_rows=2) as live:
        endpoint = Endpoint(f"{live.url}/v1", live.model, max_new_tokens=12, return_token_ids=True)
        plain = PlainAnswers.by(engine, asked, 12)
        assert plain.activations == engine.activations
        run = LoadRun(endpoint, asked, lambda: base.tokenizer, plain=plain)
        point = run.measure(Closed(2)).as_dict()
    assert (point["same"], point["compared"], point["failed"]) == (4, 4, 0)
    assert run.compared_by == "token ids"
    assert point["acceptance_length"] >= 1.0
    assert point["token_seconds"] is not None
    assert run.points[0].records[0].cached_tokens is not None


def test_tokens_without_text_belong_to_the_piece_before_or_after(server: StreamingServer) -> None:
    server.pieces, server.token_ids = ["a", "", "b", ""], [[1], [2], [3], [4]]
    endpoint = Endpoint(server.url, "served", return_token_ids=True)
    got = stream_answer(endpoint, [{"role": "user", "content": "Hi"}])
    assert [piece.token_ids for piece in got.pieces] == [(1,), (2, 3, 4)]
