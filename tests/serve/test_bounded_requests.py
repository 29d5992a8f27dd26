"""Whatever is slow ends at the request's deadline, and holds up neither others nor the exit."""

import asyncio
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from support.serving.live_server import LiveServer, live_server
from support.small_engines import random_heads

from medusa_kit.engine.engine import Engine
from medusa_kit.heads import save_heads
from medusa_kit.serve import chat, constraints
from medusa_kit.serve.bounded import lanes
from medusa_kit.serve.bounded.child import Budget
from medusa_kit.serve.deadline import Threads

MESSAGES: list[Any] = [{"role": "user", "content": "What is the sea?"}]
SOON = 60.0  # seconds after which a test has failed


def ask(live: LiveServer, model: str = "lively", **asked: Any) -> Any:
    with live.client() as client:
        return client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=4, temperature=0, **asked
        )


def test_a_schema_over_the_budget_is_the_request_s_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "SLOW", Budget(0.2, SOON, lanes.MAX_BYTES))
    monkeypatch.setattr(chat, "check_size", lambda *_: None)  # which such tools do not pass
    names = {f"p{n}": {"type": "integer"} for n in range(6000)}
    schema = {"type": "object", "properties": names}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    fields: list[tuple[str, Any]] = [
        ("response_format", {"response_format": form}), ("tools", {"tools": [tool]}),
    ]  # fmt: skip
    with live_server(engine) as live:
        for field, asked in fields:
            with pytest.raises(openai.BadRequestError, match="a simpler schema") as caught:
                ask(live, **asked)
            assert caught.value.param == field
        assert ask(live).choices
        children = [lane._child._process for lane in live.service.constraints._lanes or ()]
    assert all(one.poll() is not None for one in children)


@pytest.mark.parametrize("what", ["encoding", "models", "schema"])
def test_what_is_stuck_ends_at_the_deadline(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The server itself ends while it still is."""
    go_on = threading.Event()

    def stuck(*_: Any, **__: Any) -> Any:
        go_on.wait(SOON)
        raise AssertionError

    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"title": what}}}
    asked: Any
    with live_server(engine, request_timeout=0.3) as live:
        if what == "models":
            monkeypatch.setattr(live.service.names, "entries", stuck)
        elif what == "encoding":
            monkeypatch.setattr("medusa_kit.serve.service.encode_prompts", stuck)
        else:
            monkeypatch.setattr(lanes.Child, "ask", stuck)
        with live.client() as client:
            asked = partial(client.chat.completions.create, model="lively", messages=MESSAGES)
            if what == "models":
                asked = client.models.list
            elif what == "schema":
                asked = partial(asked, response_format=form)
            with pytest.raises(openai.APIStatusError) as caught:
                asked()
        assert caught.value.status_code == 504
        assert live.service.idle
        with live.http() as http:
            assert http.get("/health").status_code == 200
    go_on.set()


def test_threads_that_are_stuck_keep_their_places_alone() -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def stuck() -> None:
        begun.release()
        go_on.wait(SOON)

    async def both() -> str:
        threads = Threads(2)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(threads.run(stuck), 0.05)
        assert begun.acquire(timeout=SOON)
        free = await threads.run(str, "free")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(threads.run(stuck), 0.05)
        waiting = asyncio.ensure_future(threads.run(str, "later"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        go_on.set()
        return free + await waiting

    assert asyncio.run(both()) == "freelater"


def test_a_program_ends_whatever_its_background_does() -> None:
    script = (
        "import threading\n"
        "from medusa_kit.background import in_background\n"
        "in_background(threading.Event().wait)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=SOON)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize(
    "name", ["config.json", "heads.safetensors", "tree.json", "medusa_heads/config.json"]
)
def test_a_pipe_in_a_folder_of_heads_is_refused(engine: Engine, tmp_path: Path, name: str) -> None:
    save_heads(random_heads(engine.base, 2), tmp_path / "good")
    save_heads(random_heads(engine.base, 2), tmp_path / "bad")
    place = tmp_path / "bad" / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    with live_server(engine, heads_dir=str(tmp_path), request_timeout=SOON / 2) as live:
        with live.client() as client:
            listed = {one.id for one in client.models.list()}
        with pytest.raises(openai.BadRequestError, match="is no regular file") as caught:
            ask(live, "lively:bad")
        assert str(tmp_path) not in caught.value.message
        assert ask(live, "lively:good").choices
    assert "lively:good" in listed


def test_a_huge_description_of_heads_is_not_read(engine: Engine, tmp_path: Path) -> None:
    save_heads(random_heads(engine.base, 2), tmp_path / "huge")
    with (tmp_path / "huge" / "tree.json").open("wb") as file:
        file.truncate(1 << 40)
    with live_server(engine, heads_dir=str(tmp_path)) as live:
        with pytest.raises(openai.BadRequestError, match=r"tree\.json has 1099511627776 bytes"):
            ask(live, "lively:huge")
        with live.client() as client:
            client.models.list()
