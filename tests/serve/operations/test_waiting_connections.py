"""Connections without a request make room for others, and chunks of a byte are parsed in turns."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace

import httpx
import pytest
from support.serving.live_server import LiveServer, live_server

from medusa_kit.engine.engine import Engine
from medusa_kit.serve.operations import waiting
from medusa_kit.serve.operations.connections import Connection
from medusa_kit.serve.operations.waiting import PIECE, Paced

PATIENCE = 30


@pytest.fixture(scope="module")
def few(engine: Engine) -> Iterator[LiveServer]:
    with live_server(engine, max_connections=4) as live:
        yield live


def connect(live: LiveServer) -> socket.socket:
    place = httpx.URL(live.url)
    return socket.create_connection((place.host, place.port), timeout=PATIENCE)


def test_silent_connections_make_room(few: LiveServer) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(few)) for _ in range(12)]
        silent[-1].sendall(b"GET /health HTT")  # no request either
        for _ in range(3):
            with few.http() as http:
                assert http.get("/health").status_code == 200
        assert silent[0].recv(1) == b""  # closed, the oldest first
        asked = {"model": few.model, "prompt": "a", "max_tokens": 2}
        with few.http() as http:
            assert http.post("/v1/completions", json=asked).status_code == 200


def test_connections_between_requests_make_room_after_a_while(
    few: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "RESTED", 0.0)
    with ExitStack() as stack:
        for _ in range(8):
            http = stack.enter_context(few.http())
            assert http.get("/health").status_code == 200  # the connection stays open


def test_requests_under_way_are_spared(few: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = threading.Semaphore(0), Connection.take

    def noted(self: Connection, data: bytes) -> None:
        take(self, data)
        taken.release()

    monkeypatch.setattr(Connection, "take", noted)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = json.dumps({"model": few.model, "prompt": "a", "max_tokens": 2}).encode()
    with ExitStack() as stack:
        asking = [stack.enter_context(connect(few)) for _ in range(4)]
        for one in asking:
            one.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
            assert taken.acquire(timeout=PATIENCE)  # silent ones would make room
        with few.http() as http:
            answer = http.get("/health")
            assert answer.json()["error"]["code"] == "too_many_connections"
        for one in asking:
            one.sendall(body[-1:])
            assert one.recv(12) == b"HTTP/1.1 200"


def in_chunks(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 3000, 100_000])
def test_chunks_of_any_size_are_put_together(
    few: LiveServer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    taken, take = [], Connection.take

    def noted(self: Connection, data: bytes) -> None:
        taken.append(len(data))
        take(self, data)

    monkeypatch.setattr(Connection, "take", noted)
    body = json.dumps({"model": few.model, "prompt": "a", "max_tokens": 2, "suffix": ""})
    body = body.ljust(20_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(few) as one:
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + in_chunks(body.encode(), size)
        one.sendall(chunked)
        assert one.recv(12) == b"HTTP/1.1 200"
        counted = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body.encode())
        one.sendall(counted)
        got = one.recv(65536)
        while b"HTTP/1.1 200" not in got:
            got += one.recv(65536)
    assert sum(taken) == len(chunked) + len(counted)
    assert all(one <= PIECE for one in taken[: len(chunked) // PIECE])


def test_several_send_chunks_at_once(few: LiveServer) -> None:
    body = json.dumps({"model": few.model, "prompt": "a", "max_tokens": 2}).ljust(5000).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        asking = [stack.enter_context(connect(few)) for _ in range(3)]
        for one in asking:
            one.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + in_chunks(body, 1))
        asking[0].close()  # with pieces left
        for one in asking[1:]:
            assert one.recv(12) == b"HTTP/1.1 200"


class Expensive:
    """A connection whose pieces take `seconds` each; `turns`: of the loop, when each was taken."""

    def __init__(self, seconds: float, turns: list[int]) -> None:
        self.seconds, self.turns, self.taken = seconds, turns, list[int]()
        self.flow = SimpleNamespace(held=False, pause_reading=int, resume_reading=int)
        self.transport = SimpleNamespace(is_closing=lambda: False)
        self.parses_fast = False

    def take(self, piece: bytes) -> None:
        self.taken.append(self.turns[0])
        time.sleep(self.seconds)


def test_what_is_expensive_to_parse_leaves_others_time() -> None:
    async def run() -> list[int]:
        loop, turns = asyncio.get_running_loop(), [0]

        def turn() -> None:
            turns[0] += 1
            loop.call_soon(turn)

        turn()
        connection = Expensive(0.05, turns)
        Paced().add(connection, bytes(3 * PIECE))
        while len(connection.taken) < 3:
            await asyncio.sleep(0)
        return [after - before for before, after in pairwise(connection.taken)]

    between = asyncio.run(run())
    assert min(between) > 20  # with no pause it is one
