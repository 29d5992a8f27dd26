"""benchmarks/peer_tasks.py: rounds in pieces, loops left out, ratios to llama.cpp's best."""

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.small_engines import build_engine

from medusa_kit.base.model import BaseModel

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
ROWS = [{"category": "code", "ids": [1, 2]}, {"category": "chat", "ids": [3]}]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("peer_tasks")


@pytest.fixture
def tables(script: Any) -> Any:
    return sys.modules["peer_report"]


@pytest.fixture
def llama_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked = list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            took = {"prompt_ms": 100.0, "predicted_ms": 500.0, "predicted_n": 3, "cache_n": 1}
            sent = json.dumps({"tokens": [5, 6, 7], "timings": took}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *what: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_gets_ids_and_its_own_clock_counts(script: Any, llama_server: Any) -> None:
    url, asked = llama_server
    assert script.served(url, 4)([1, 2]) == (0.1, 0.5, [5, 6, 7], 1)
    assert (asked[0]["prompt"], asked[0]["n_predict"]) == ([1, 2], 4)


def test_an_engine_gets_the_same_ids(script: Any, base: BaseModel) -> None:
    engine = build_engine(base, heads=None)
    first, after, ids, _ = script.loaded(engine, 4)([1, 2, 3])
    assert first > 0
    assert after > 0
    assert ids == engine.generate([1, 2, 3], max_new_tokens=4).token_ids


def test_a_round_goes_on_where_it_was_left(script: Any) -> None:
    calls = list[tuple[str, tuple[int, ...]]]()

    def asked(name: str) -> Any:
        def ask(ids: list[int]) -> Any:
            calls.append((name, tuple(ids)))
            return 0.1, 0.2, [1, 2], 0

        return ask

    everybody = {name: asked(name) for name in ("a", "b")}
    known = next(script.measure(ROWS, everybody, []))
    assert sorted(calls) == [("a", (1, 2)), ("b", (1, 2))]
    del calls[:]
    rest = [one for found in script.measure(ROWS, everybody, known) for one in found]
    assert sorted(calls) == [("a", (3,)), ("b", (3,))]
    again = next(script.measure(ROWS, everybody, [*known, *rest]))
    assert {(one.round, one.prompt) for one in again} == {(1, 0)}


def answers(tables: Any, name: str, seconds: float, loops: bool = False) -> list[Any]:
    ids = list(range(11))
    text = [1, 2] * 30 if loops else ids
    return [
        tables.Answer(name, 0, 0, "code", 1.0, seconds, ids, 0),
        tables.Answer(name, 0, 1, "chat", 1.0, 100.0, text, 0),
    ]


def test_a_looping_answer_leaves_everybodys_prompt_out(tables: Any) -> None:
    found = answers(tables, "llama.cpp", 2.0) + answers(tables, "int8, plain", 1.0, loops=True)
    assert {one.prompt for one in tables.counted(found)} == {0}


def test_ratios_are_to_plain_and_to_the_best(tables: Any) -> None:
    found = [
        *answers(tables, "llama.cpp", 2.0), *answers(tables, "llama.cpp, draft", 1.0),
        *answers(tables, "int8, plain", 1.0), *answers(tables, "int8, auto", 0.5),
    ]  # fmt: skip
    own, names = [one for one in found if one.category == "code"], []
    names = ["llama.cpp", "llama.cpp, draft", "int8, auto", "int8, plain"]
    assert tables.speed(own, "llama.cpp", tables.DECODING) == 5.0
    assert tables.speed(own, "llama.cpp", tables.WHOLE) == pytest.approx(11 / 3)
    plain = tables.against_plain(own, names, tables.DECODING)
    assert "| code | 1 | 5.0 | 2.00 | 4.00 | 2.00 |" in plain
    best = tables.against_best(own, names, tables.DECODING)
    assert "| code | llama.cpp, draft | 10.0 | 2.00 | 1.00 |" in best
    assert "2 prompts in 1 rounds, 0 left out" in tables.report(found)
    assert "llama.cpp, draft: 2 of 2; int8, auto: 2 of 2" in tables.report(found)
