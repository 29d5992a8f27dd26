"""Heads per request over HTTP: `model` = BASE:HEADS or LoRAX's adapter_id, loaded in the
background, told in /v1/models, usage and /metrics. Every answer is the plain one."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from support.callers import all_at_once
from support.serving.live_server import LiveServer, live_server
from support.small_engines import random_heads
from support.tiny_models import tiny_base

from medusa_kit.engine import heads_reading
from medusa_kit.engine.engine import Engine
from medusa_kit.heads import save_heads

MESSAGES: list[Any] = [{"role": "user", "content": "What is the sea?"}]
SOON = 60.0  # seconds after which a test has failed


@pytest.fixture
def root(engine: Engine, tmp_path: Path) -> Path:
    save_heads(random_heads(engine.base, 2), tmp_path / "few")
    save_heads(random_heads(engine.base, 4, kind="hydra"), tmp_path / "many")
    return tmp_path


@pytest.fixture
def live(engine: Engine, root: Path) -> Iterator[LiveServer]:
    with live_server(engine, max_rows=8, max_queue=99, heads_dir=str(root)) as server:
        yield server


def ask(client: OpenAI, model: str, **asked: Any) -> Any:
    extra = {"return_token_ids": True, **asked.pop("extra_body", {})}
    asked = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0, **asked}
    return client.chat.completions.create(model=model, extra_body=extra, **asked)


def plain(engine: Engine, tokens: int = 16, **options: Any) -> list[int]:
    answer = engine.generate(MESSAGES, max_new_tokens=tokens, drafter="none", **options)
    return [token for token in answer.token_ids if token not in engine.base.stop_token_ids]


def test_differing_heads_and_drafters_share_a_batch(live: LiveServer) -> None:
    drafted = {"medusa_kit": {"drafter": "prompt-lookup"}}
    asks: list[tuple[str, dict[str, Any], str | None]] = [
        ("lively", {}, None),
        ("lively:few", {}, "few"),
        ("lively:many", {}, "many"),
        ("lively", {"extra_body": {"adapter_id": "few"}}, "few"),
        ("lively", {"extra_body": {"adapter_id": "many", "adapter_source": "local"}}, "many"),
        ("lively", {"extra_body": drafted}, None),
        ("lively:few", {"temperature": 1.0, "seed": 4}, "few"),
        ("lively:many", {"extra_body": drafted}, "many"),
    ]

    def one(number: int) -> Any:
        model, asked, _ = asks[number]
        with live.client() as client:
            return ask(client, model, **asked)

    for (_, asked, heads), answer in zip(asks, all_at_once(one, len(asks)), strict=True):
        options = {name: asked[name] for name in ("temperature", "seed") if name in asked}
        assert answer.choices[0].model_extra["token_ids"] == plain(live.service.engine, **options)
        assert answer.model == ("lively" if heads is None else f"lively:{heads}")
        told = answer.usage.model_extra["medusa_kit"]
        assert told["heads"] == heads
        lookup = "medusa_kit" in asked.get("extra_body", {})
        drafter = "prompt-lookup" if lookup else "hydra" if heads == "many" else "medusa"
        assert told["drafter"].startswith(drafter)
    with live.http() as http:
        lines = http.get("/metrics").text.splitlines()
    for drafter, heads, count in (
        ("medusa", "few", 3), ("medusa", "many", 2), ("medusa", "", 1),
        ("prompt-lookup", "", 1), ("prompt-lookup", "many", 1),
    ):  # fmt: skip
        labels = f'{{drafter="{drafter}",heads="{heads}"}}'
        assert f"medusa_kit_answers_total{labels} {count}.0" in lines
        assert any(line.startswith(f"medusa_kit_answer_tokens_total{labels}") for line in lines)
        assert any(line.startswith(f"medusa_kit_answer_steps_total{labels}") for line in lines)
    assert "medusa_kit_heads_loaded 2.0" in lines
    used = live.service.heads.num_bytes
    (told_bytes,) = [line for line in lines if line.startswith("medusa_kit_heads_bytes ")]
    assert float(told_bytes.split()[1]) == used > 0


def test_the_list_of_models(live: LiveServer) -> None:
    with live.client() as client:
        assert [one.id for one in client.models.list()] == ["lively", "lively:few", "lively:many"]
        assert client.models.retrieve("lively:many").model_extra["medusa_kit"]["num_heads"] == 4
        for unknown in ("lively:none", "other", "lively:../few"):
            with pytest.raises(openai.NotFoundError) as caught:
                client.models.retrieve(unknown)
            assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_heads(live: LiveServer, stream: bool) -> None:
    given: list[tuple[str, dict[str, Any], str]] = [
        ("other", {}, "model"),
        ("lively:other", {}, "model"),
        ("lively:../few", {}, "model"),
        ("lively", {"adapter_id": "other"}, "adapter_id"),
        ("lively", {"adapter_id": "few", "adapter_source": "hub"}, "adapter_id"),
    ]
    with live.client() as client:
        for model, extra, param in given:
            with pytest.raises(openai.NotFoundError) as caught:
                ask(client, model, extra_body=extra, stream=stream)
            assert (caught.value.code, caught.value.param) == ("model_not_found", param)
        with pytest.raises(openai.BadRequestError, match="name different heads") as refused:
            ask(client, "lively:few", extra_body={"adapter_id": "many"})
        assert refused.value.param == "adapter_id"


def test_heads_that_cannot_be_used_are_the_request_s_fault(live: LiveServer, root: Path) -> None:
    save_heads(random_heads(tiny_base("llama")), root / "foreign")
    shutil.copytree(root / "few", root / "broken")
    (root / "broken" / "heads.safetensors").write_bytes(b"cut")
    with live.client() as client:
        for name, said in (("foreign", "trained for 'tiny-llama'"), ("broken", "broken")):
            with pytest.raises(openai.BadRequestError, match=said) as caught:
                ask(client, f"lively:{name}")
            assert caught.value.param == "model"
            assert str(root) not in str(caught.value)
        assert ask(client, "lively:few").choices[0].finish_reason


def test_heads_beyond_the_cap(engine: Engine, root: Path) -> None:
    size = random_heads(engine.base, 2).num_bytes
    options: Any = {"heads_dir": str(root), "heads_memory": size / 2 / 1e9}
    with live_server(engine, **options) as live, live.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client, "lively:few")
        assert (caught.value.status_code, caught.value.code) == (503, "out_of_memory")
        assert ask(client, "lively").choices[0].finish_reason


def test_a_folder_deleted_while_in_use(live: LiveServer, root: Path) -> None:
    """The answer under way goes on; the next request finds no such heads, the others do."""
    with live.client() as client:
        stream = ask(client, "lively:few", stream=True, max_tokens=200)
        chunks = [next(stream), next(stream)]
        shutil.rmtree(root / "few")
        with pytest.raises(openai.NotFoundError):
            ask(client, "lively:few")
        other = ask(client, "lively:many").choices[0].model_extra["token_ids"]
        chunks += stream
        ids = [
            token
            for chunk in chunks
            for token in (chunk.choices[0].model_extra or {}).get("token_ids", [])
        ]
        assert ids == plain(live.service.engine, 200)
        assert other == ids[:16]
        assert [one.id for one in client.models.list()] == ["lively", "lively:many"]


def test_loading_holds_up_nobody_else(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait for the same heads; they are loaded once."""
    started, go_on, calls = threading.Event(), threading.Event(), []
    load = heads_reading.load_heads

    def slow(*args: Any, **options: Any) -> Any:
        calls.append(args)
        started.set()
        assert go_on.wait(SOON)
        return load(*args, **options)

    monkeypatch.setattr(heads_reading, "load_heads", slow)

    async def both() -> None:
        limits = httpx.Limits(max_connections=99)
        async with httpx.AsyncClient(base_url=live.url, timeout=SOON, limits=limits) as http:

            async def asked(model: str) -> httpx.Response:
                fields = {"model": model, "prompt": "a", "max_tokens": 2, "temperature": 0}
                return await http.post("/v1/completions", json=fields)

            # More than asyncio has threads for what blocks.
            waiting = [asyncio.create_task(asked("lively:few")) for _ in range(40)]
            assert await asyncio.to_thread(started.wait, SOON)
            while len(live.service._under_way) < len(waiting):  # until all have come
                await asyncio.sleep(0.01)
            assert (await asked("lively")).status_code == 200
            listed = (await http.get("/v1/models")).json()["data"]
            assert listed[1]["medusa_kit"]["state"] == "loading"
            assert not any(one.done() for one in waiting)
            go_on.set()
            assert {one.status_code for one in await asyncio.gather(*waiting)} == {200}

    try:
        asyncio.run(both())
    finally:
        go_on.set()
    assert len(calls) == 1
    assert not any(one.in_use for one in live.service.heads.statuses())


def test_a_wait_for_heads_ends_at_the_time_limit(
    engine: Engine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(heads_reading, "load_heads", lambda *_, **__: go_on.wait(SOON))
    with live_server(engine, heads_dir=str(root), request_timeout=0.05) as live:
        try:
            with live.client() as client, pytest.raises(openai.APIStatusError) as caught:
                ask(client, "lively:few")
            assert caught.value.status_code == 504
            assert live.service.idle
        finally:
            go_on.set()
