"""benchmarks/serving.py: rounds over several servers, on stand-ins and a process that is none."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.serving.streaming_server import StreamingServer

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("serving")


@pytest.fixture
def run(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the script on prompts q1, q2, …; returns what it exits with, and serving.json."""

    def call(servers: list[dict[str, str]], prompts: int, *options: str) -> Any:
        rows = [{"prompt": f"q{number}"} for number in range(1, prompts + 1)]
        (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "servers.yaml").write_text(yaml.safe_dump(servers))
        values = {"python": sys.executable, "bin": "", "threads": 1, "rows": 4}
        monkeypatch.setattr(script, "values_of", lambda loads, given: values)
        monkeypatch.setattr(script, "stop_on_signals", lambda: None)  # they are the tests' own
        monkeypatch.setattr(
            sys, "argv", ["serving", str(tmp_path / "prompts.jsonl"), "--servers",
                          str(tmp_path / "servers.yaml"), "--output", str(tmp_path), *options],
        )  # fmt: skip
        with pytest.raises(SystemExit) as leaving:
            script.main()
        written = tmp_path / "serving.json"
        return leaving.value.code, json.loads(written.read_text()) if written.exists() else None

    return call


@pytest.fixture
def stand_ins(script: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, StreamingServer]]:
    servers = {name: StreamingServer() for name in ("ours", "theirs")}
    begun: list[str] = []

    @contextlib.contextmanager
    def running(server: dict[str, str], values: Any, log: Path) -> Iterator[tuple[str, int, float]]:
        begun.append(server["name"])
        if server["name"] not in servers:
            raise RuntimeError("it ended with status 3: no memory")
        yield servers[server["name"]].url, os.getpid(), 1.25

    monkeypatch.setattr(script, "running", running)
    script.begun = begun
    yield servers
    for one in servers.values():
        one.close()


def described(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "command": name, "model": f"{name} on {{port}}"} for name in names]


def test_every_server_has_the_same_prompts_in_every_round(
    run: Any, script: Any, stand_ins: dict[str, StreamingServer], tmp_path: Path
) -> None:
    stand_ins["theirs"].pieces = ["some", " other", " text", "!"]
    code, record = run(described("ours", "theirs", "broken"), 4, "--rounds", "2", "--concurrency",
                       "1,2", "--warm-up", "1")  # fmt: skip
    assert code == 0
    assert script.begun == ["ours", "theirs", "broken", "theirs", "ours"], "rotated"
    first = [q for q in stand_ins["ours"].questions if q.startswith("q")]
    assert sorted(first) == sorted(q for q in stand_ins["theirs"].questions if q.startswith("q"))
    assert (first[:4], sorted(first[4:8])) == (["q1", "q3"] * 2, ["q2", "q2", "q4", "q4"])
    assert (first[8:12], sorted(first[12:])) == (["q2", "q4"] * 2, ["q1", "q1", "q3", "q3"])
    assert record["not_run"] == {"broken": "it ended with status 3: no memory"}
    for name, tokens in (("ours", 5), ("theirs", 7)):
        for one in record["rounds"][name]:
            assert [point["concurrency"] for point in one] == [1, 2]
            for point in one:
                assert point["unseen"]["tokens"] == point["seen"]["tokens"] == 2 * tokens
    table = (tmp_path / "serving.md").read_text()
    assert "1 at once, prompts unseen" in table
    assert "| theirs |" in table
    assert "0/4" in table, "the texts differ"
    assert "4/4" in table, "but not from itself"
    assert "- broken: not run: it ended with status 3: no memory" in table
    assert [one["start_seconds"] for one in record["costs"]["theirs"]] == [1.25, 1.25]
    assert "| theirs | 1.2 |" in table
    assert (tmp_path / "load.png").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_memory_of_a_server_includes_its_processes(script: Any) -> None:
    hold = "held = bytearray(100_000_000); print(flush=True); input()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    shell = [sys.executable, "-c", start]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as outer:
        assert outer.stdout is not None
        outer.stdout.readline()
        assert script.peak_bytes(outer.pid) > 100_000_000
        outer.communicate(b"\n")
    assert script.peak_bytes(outer.pid) is None, "it ended"


def test_requests_that_arrive(run: Any, stand_ins: dict[str, StreamingServer]) -> None:
    code, record = run(described("ours"), 2, "--rounds", "1", "--rate", "500", "--warm-up", "0")
    assert code == 0
    assert record["arrivals"] == {"kind": "poisson", "seed": 0}
    assert record["rounds"]["ours"][0][0]["rate"] == 500.0


def test_ratios_are_of_one_round(script: Any) -> None:
    def of(*speeds: float) -> list[Any]:
        return [[{"seen": {"tokens_per_second": speed}}] for speed in speeds]

    rounds = {"ours": of(10.0, 30.0, 20.0), "theirs": of(5.0, 10.0), "none": of(0.0)}
    asked = (0, "seen", script.tokens_per_second)
    assert script.ratios(rounds, "ours", "theirs", *asked) == [2.0, 3.0]
    assert script.ratios(rounds, "ours", "none", *asked) == []
    assert script.spread([2.0, 3.0]) == "2.50 (2.00 to 3.00)"


def test_commands_that_serve_nothing_are_rows_with_the_reason(run: Any, tmp_path: Path) -> None:
    """Real processes: one that is not there, one that ends, one that is no such server."""
    servers = described("missing", "ends", "files")
    servers[0]["command"] = str(tmp_path / "no-such-program")
    servers[1]["command"] = "{python} -S -c 'raise SystemExit(\"no memory\")'"
    servers[2]["command"] = "{python} -m http.server {port} --bind 127.0.0.1"
    code, record = run(servers, 1, "--rounds", "2", "--concurrency", "1")
    assert code == 1
    assert "No such file" in record["not_run"]["missing"]
    assert record["not_run"]["ends"] == "it ended with status 1: no memory"
    assert "answers 501" in record["not_run"]["files"]


def test_every_load_needs_prompts(run: Any) -> None:
    code, record = run(described("ours"), 1, "--concurrency", "1,2")
    assert (code, record) == ("1 prompts for 2 loads; each needs its own", None)


def test_the_servers_that_come_with_it(script: Any) -> None:
    names = [server["name"] for server in script.read_servers(script.SERVERS, [])]
    assert len(names) == len(set(names))
    assert names[:2] == ["medusa-kit, auto", "medusa-kit, plain"]
    chosen = script.read_servers(script.SERVERS, ["llama.cpp"])
    assert [server["name"] for server in chosen] == ["llama.cpp"]
    with pytest.raises(SystemExit, match="has no server"):
        script.read_servers(script.SERVERS, ["nobody's"])
    json_of_theirs = script.put_in("x '{\"a\": 1}' {port}", {"port": 8})
    assert json_of_theirs == "x '{\"a\": 1}' 8"
