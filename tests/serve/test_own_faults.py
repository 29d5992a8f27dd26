"""What fails on the server's side is no fault of the client's, and says nothing of how the server
was built."""

import errno
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors
from support.serving.live_server import live_server
from support.small_engines import build_engine, lively_chat_base, random_heads

from medusa_kit.engine.engine import Engine
from medusa_kit.errors import CheckpointError, MedusaKitError, StorageError, without_stack
from medusa_kit.heads import checkpoint, save_heads
from medusa_kit.heads.checkpoint import load_heads
from medusa_kit.infer.decode.threaded import request_queue
from medusa_kit.serve import server

TRACE = """Storage size calculation overflowed
Exception raised from empty_generic at /pytorch/aten/src/ATen/EmptyTensor.cpp:203 (most recent call first):
C++ CapturedTraceback:
#4 std::_Function_handler<std::shared_ptr<c10::LazyValue> > from Logging.cpp:0
#5 c10::Error::Error(c10::SourceLocation) from ??:0
frame #0: c10::Error::Error + 0x80 (0x7f in /usr/lib/libc10.so)
<omitting python frames>
"""  # noqa: E501


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (f"no such heads: {TRACE}", "no such heads: Storage size calculation overflowed"),
        ('x INTERNAL ASSERT FAILED at "/build/a/b-c.cpp":12, please', "x INTERNAL ASSERT FAILED"),
        ("[enforce fail at alloc_cpu.cpp:127] err == 0. No memory", "err == 0. No memory"),
        ("heads at /tmp/a are broken", "heads at /tmp/a are broken"),
        ("a is\nof two lines", "a is\nof two lines"),
    ],
)
def test_messages_have_no_stack_of_a_library(said: str, left: str) -> None:
    assert str(MedusaKitError(said)).startswith(left)
    for word in ("frame", "c10", ".cpp", "/build", "/pytorch"):
        assert word not in without_stack(said)


def test_heads_of_impossible_sizes(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_heads(random_heads(engine.base), tmp_path)

    def overflows(*_: Any) -> None:
        raise CheckpointError(f"no tensor has the sizes of these heads: {TRACE}")

    monkeypatch.setattr(checkpoint, "_shared_tensors", overflows)
    with pytest.raises(CheckpointError) as raised:
        load_heads(tmp_path, engine.base)
    assert ".cpp" not in str(raised.value)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_files_that_cannot_be_read_now_are_the_servers_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    base = lively_chat_base()
    save_heads(random_heads(base), tmp_path / "some")

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, "cannot be opened now")

    monkeypatch.setattr(checkpoint, "load_file", fails)
    monkeypatch.setattr(safetensors, "safe_open", fails)
    with pytest.raises(StorageError):
        load_heads(tmp_path / "some", base)
    with live_server(build_engine(base), heads_dir=str(tmp_path)) as live, live.http() as http:
        asked = {"model": f"{live.model}:some", "prompt": "a", "max_tokens": 2}
        answer = http.post("/v1/completions", json=asked)
    assert answer.status_code >= 500, answer.text
    assert str(tmp_path) not in answer.text


def test_a_damaged_file_is_the_requests_fault(tmp_path: Path) -> None:
    base = lively_chat_base()
    save_heads(random_heads(base), tmp_path / "some")
    (tmp_path / "some" / "heads.safetensors").write_bytes(b"cut off")
    with live_server(build_engine(base), heads_dir=str(tmp_path)) as live, live.http() as http:
        asked = {"model": f"{live.model}:some", "prompt": "a", "max_tokens": 2}
        assert http.post("/v1/completions", json=asked).status_code == 400


def test_a_server_that_lost_its_device_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "is_device_lost", lambda error: "CUDA" in str(error))
    monkeypatch.setattr(server, "TELLING", 1000.0)
    engine = build_engine(lively_chat_base())

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with live_server(engine) as live:

        def ask(path: str, body: Any = None) -> httpx.Response:
            """On a connection of its own: one that answered 500 is closed."""
            with live.http() as http:
                return http.get(path) if body is None else http.post(path, json=body)

        assert ask("/health").status_code == 200
        monkeypatch.setattr(type(engine.verifier), "score", broken)
        monkeypatch.setattr(type(engine.verifier), "read_prompts", broken)
        asked = {"model": live.model, "prompt": "a", "max_tokens": 9}
        assert ask("/v1/completions", asked).status_code == 500
        while ask("/health").status_code != 503:
            pass
        assert ask("/health").json()["status"] == "failed"
        assert ask("/v1/completions", asked).status_code == 503
        while live.server.failure is None:
            threading.Event().wait(0.01)
        monkeypatch.setattr(live.server, "_told_until", 0.0)
        live.thread.join(30)
        assert not live.thread.is_alive()
        assert "illegal memory access" in live.server.failure


def test_a_token_after_which_the_model_gives_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """It ends the request that holds it, also a stream, and the log names the reason."""
    base = lively_chat_base()
    base.model.get_input_embeddings().weight.data[40] = float("nan")
    bad, good = [10, 40, 12], [10, 41, 12]
    with live_server(build_engine(base)) as live, live.http() as http:
        asked = {"model": live.model, "max_tokens": 8, "temperature": 0}
        for more in ({}, {"temperature": 1, "seed": 1}):
            before = http.post("/v1/completions", json={**asked, **more, "prompt": good})
            assert before.status_code == 200, before.text
            answer = http.post("/v1/completions", json={**asked, **more, "prompt": bad})
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_finite")
            assert "NaN or infinite" in answer.json()["error"]["message"]
            after = http.post("/v1/completions", json={**asked, **more, "prompt": good})
            assert after.json()["choices"] == before.json()["choices"]
        stream = http.post("/v1/completions", json={**asked, "prompt": bad, "stream": True})
        assert "not_finite" in stream.text
        assert "!!" not in stream.text
    assert "NaN or infinite" in capsys.readouterr().err
