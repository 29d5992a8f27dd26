"""`medusa-kit serve --replicas 2` on Ray itself (`make test-ray`): a tiny model, one machine."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI
from support.serving.waiting import until
from support.small_engines import random_heads

from medusa_kit.base.loading import load_base_model
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import load
from medusa_kit.heads import save_heads
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: make test-ray")

CHAT = "/v1/chat/completions"
KEY = "sk-test"
PATIENCE = 240  # seconds


class RayServer:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lines = process, list[str]()
        self._told = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        found = re.search(r"(http\S+)/v1 ", self.wait_for("serving "))
        assert found is not None
        self.url = found.group(1)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._told:
                self.lines.append(line)
                self._told.notify_all()
        with self._told:
            self.lines.append("EOF")
            self._told.notify_all()

    def wait_for(self, start: str) -> str:
        def found() -> str | None:
            return next((one for one in self.lines if one.startswith((start, "EOF"))), None)

        with self._told:
            assert self._told.wait_for(lambda: found() is not None, PATIENCE), self.lines
        line = found()
        assert line is not None
        assert line != "EOF", "".join(self.lines)
        return line

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.url, timeout=PATIENCE, headers=headers)

    def replicas(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in children if "ServeReplica" in " ".join(one.cmdline())]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()


def started(*options: str) -> RayServer:
    command = [sys.executable, "-m", "medusa_kit", "serve", "--model", "debug-tiny", "--device",
               "cpu", "--heads", "none", "--port", "0", *options]  # fmt: skip
    return RayServer(subprocess.Popen(
        command, env={**os.environ, "MEDUSA_KIT_API_KEYS": KEY}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ))  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    folder = tmp_path_factory.mktemp("heads")
    base = load_base_model("debug-tiny", device="cpu")
    for name in ("one", "two"):
        save_heads(random_heads(base), folder / name)
        save_tree(CandidateTree.from_choices([(0,), (0, 0)]), folder / name / "tree.json", {})
    server = started("--replicas", "2", "--max-rows", "4", "--heads-dir", str(folder))
    yield server
    server.close()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("debug-tiny", device="cpu", heads=None)


def asked(text: str, **options: Any) -> dict[str, Any]:
    stops = load_base_model("debug-tiny", device="cpu").stop_token_ids
    return {"model": "debug-tiny", "messages": [{"role": "user", "content": text}],
            "max_tokens": 8, "temperature": 0,
            "logit_bias": {str(token): -100 for token in stops}, **options}  # fmt: skip


def counted(http: httpx.Client, name: str) -> dict[str, float]:
    """A counter by replica."""
    found = re.findall(rf'^{name}{{.*replica="(\w+)".*}} (\S+)$', http.get("/metrics").text, re.M)
    return {replica: float(value) for replica, value in found}


def test_two_replicas_answer_as_one_server(live: RayServer, engine: Engine) -> None:
    assert len(live.replicas()) == 2
    assert httpx.post(live.url + CHAT, json=asked("x")).status_code == 401
    with OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as client:
        for number in range(4):
            request = asked(f"What is {number}?")
            bias = {int(token): -100.0 for token in request["logit_bias"]}
            wanted = engine.generate(request["messages"], max_new_tokens=8, logit_bias=bias).text
            assert client.chat.completions.create(**request).choices[0].message.content == wanted
            chunks = list(client.chat.completions.create(stream=True, **request))
            assert "".join(one.choices[0].delta.content or "" for one in chunks) == wanted


def test_a_client_that_hangs_up_frees_its_place(live: RayServer) -> None:
    with live.http() as http:
        before = sum(counted(http, "medusa_kit_tokens_total").values())
        with http.stream("POST", CHAT, json=asked("long", max_tokens=900, stream=True)) as answer:
            next(answer.iter_lines())
        until(lambda: http.get("/v1/batch").json()["rows"] == 0, PATIENCE)
        assert sum(counted(http, "medusa_kit_tokens_total").values()) - before < 900


def test_a_prefix_is_read_once(live: RayServer) -> None:
    talks = [[{"role": "user", "content": f"{one} " * 60}] for one in ("sea", "sky", "sun")]
    with live.http() as http:
        for turn in range(4):
            for talk in talks:
                answer = http.post(CHAT, json={**asked(""), "messages": talk}).json()
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached > 100) == (turn > 0)
                talk.append({"role": "assistant", "content": "ok"})
                talk.append({"role": "user", "content": f"and {turn}?"})


def test_heads_are_loaded_once(live: RayServer) -> None:
    with live.http() as http:
        for number in range(4):
            for name in ("one", "two"):
                request = {**asked(f"{number} {name}"), "model": f"debug-tiny:{name}"}
                assert http.post(CHAT, json=request).status_code == 200
        assert sum(counted(http, "medusa_kit_heads_loaded").values()) == 2


def test_a_replica_killed_under_load_fails_no_request(live: RayServer) -> None:
    answered, lock, stop = list[int](), threading.Lock(), threading.Event()

    def ask(worker: int) -> None:
        with live.http() as http:
            number = 0
            while not stop.is_set():
                number += 1
                request = asked(f"{worker} asks {number}", max_tokens=200)
                status = http.post(CHAT, json=request).status_code
                with lock:
                    answered.append(status)

    with ThreadPoolExecutor(6) as workers:
        asking = [workers.submit(ask, worker) for worker in range(6)]
        try:
            with live.http() as http:
                until(
                    lambda: http.get("/v1/batch").json()["rows"] > 3 and len(answered) > 12,
                    PATIENCE,
                )
                live.replicas()[0].kill()
                killed_at = len(answered)
                live.wait_for("warning: a replica was lost")
                until(lambda: len(answered) > killed_at + 24, PATIENCE)
        finally:
            stop.set()
        for one in asking:
            one.result()
    assert set(answered) == {200}
    with live.http() as http:  # Ray starts another
        until(lambda: http.get("/health").json()["replicas"] == 2, PATIENCE)


def test_at_the_end_answers_finish(live: RayServer) -> None:
    with live.http() as http:
        request = asked("last", max_tokens=400, stream=True)
        with http.stream("POST", CHAT, json=request) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert live.process.wait(PATIENCE) == 0
    assert "the server has ended\n" in live.lines[-3:]


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    command = [sys.executable, "-m", "medusa_kit", "serve", "--model", str(tmp_path),
               "--port", "0", "--replicas", "2"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert f"error: no replica could be started: {tmp_path}" in done.stderr
    assert "\nhint: " in done.stderr
