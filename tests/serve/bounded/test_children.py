"""Schemas that would take seconds and gigabytes: refused within a budget, in children that end with
the server, without holding up usual ones."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import medusa_kit
from medusa_kit.errors import ClosedError, ConfigError, MedusaKitError, QueueFullError
from medusa_kit.serve import constraints
from medusa_kit.serve.bounded import child, lanes
from medusa_kit.serve.bounded.child import Budget
from medusa_kit.serve.calls.tools import constraint_of
from medusa_kit.serve.constraints import Constraints
from medusa_kit.serve.errors import ServerClosingError

SOON = 60.0  # seconds after which a test has failed
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="by /proc")
USUAL = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def form(schema: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    described = {"name": "a", "schema": schema, "strict": strict}
    return {"type": "json_schema", "json_schema": described}


def slow(number: int = 0) -> dict[str, Any]:
    """Some seconds of llguidance's."""
    names = {f"p{number}_{n}": {"type": "integer"} for n in range(6000)}
    return {"type": "object", "properties": names}


def tool(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


@pytest.fixture(scope="module")
def few() -> Iterator[pytest.MonkeyPatch]:
    """A smaller budget than the server's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(constraints, "QUICK", Budget(0.05, SOON, lanes.MAX_BYTES))
        patched.setattr(constraints, "SLOW", Budget(0.3, SOON, lanes.MAX_BYTES))
        yield patched


@pytest.fixture(scope="module")
def shared(few: pytest.MonkeyPatch) -> Iterator[Constraints]:
    made = Constraints()
    made.start()
    yield made
    made.close()


def asked(of: Constraints, response_format: Any = None, tools: Any = None) -> Any:
    return asyncio.run(of.of(response_format, tools, None, None))


def processes(of: Constraints) -> list[int]:
    assert of._lanes is not None
    return [lane._child._process.pid for lane in of._lanes]


def test_what_is_found_is_what_the_server_itself_would_find(shared: Constraints) -> None:
    left_out = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    for one in (USUAL, left_out):
        assert asked(shared, form(one)) == constraint_of(form(one))
        assert asked(shared, None, [tool(one)]) == constraint_of(None, [tool(one)])
    with pytest.raises(ConfigError) as here:
        constraint_of(form(left_out, strict=True))
    with pytest.raises(ConfigError) as there:
        asked(shared, form(left_out, strict=True))
    assert (there.value.message, there.value.hint) == (here.value.message, here.value.hint)


@pytest.mark.parametrize("strict", [False, True])
def test_what_takes_long_is_refused_and_remembered(
    shared: Constraints, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for field, fields in (
        ("response_format", (form(slow(1), strict), None)),
        ("tools", (None, [tool(slow(1), strict=strict)])),
    ):
        with pytest.raises(ConfigError, match=rf"^{field}: .* more than 0\.3 s"):
            asked(shared, *fields)
        with monkeypatch.context() as patched:
            patched.setattr(shared, "_lanes", None)
            patched.setattr(shared, "_closed", True)  # nobody would look
            with pytest.raises(ConfigError, match=r"more than 0\.3 s"):
                asked(shared, *fields)


@LINUX
@pytest.mark.parametrize("schema", [{"const": "ab " * 300_000}, {"enum": ["x" * 9_000_000]}])
def test_what_takes_memory_is_refused(schema: Any, few: pytest.MonkeyPatch) -> None:
    with few.context() as patched:
        much = Budget(SOON, SOON, 32 << 20)
        patched.setattr(constraints, "QUICK", much)
        patched.setattr(constraints, "SLOW", much)
        made = Constraints()
        try:
            with pytest.raises(ConfigError, match="more than 32 MB"):
                asked(made, form(schema))
        finally:
            made.close()


def test_what_is_nested_too_deeply_ends_a_fork_alone(shared: Constraints) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    before = processes(shared)
    with contextlib.suppress(ConfigError, RecursionError):
        asked(shared, form(schema))
    assert asked(shared, form({**USUAL, "title": "after it"})).grammar is not None
    assert processes(shared) == before


def test_usual_schemas_do_not_wait_for_others(shared: Constraints) -> None:
    ended = list[str]()

    async def one(name: str, schema: dict[str, Any]) -> None:
        with contextlib.suppress(MedusaKitError):
            await shared.of(form(schema), None, None, None)
        ended.append(name)

    async def all_of_them() -> None:
        bombs = [asyncio.ensure_future(one("slow", slow(10 + n))) for n in range(4)]
        await asyncio.sleep(0)
        await asyncio.gather(one("usual", {**USUAL, "title": "in between"}), *bombs)

    asyncio.run(all_of_them())
    assert ended[:2].count("usual") == 1


def test_few_may_wait_that_take_long(shared: Constraints) -> None:
    async def all_of_them() -> list[Any]:
        many = (shared.of(form(slow(20 + n)), None, None, None) for n in range(8))
        return await asyncio.gather(*many, return_exceptions=True)

    found = asyncio.run(all_of_them())
    assert {type(one) for one in found} == {ConfigError, QueueFullError}
    place = next(n for n, one in enumerate(found) if isinstance(one, QueueFullError))
    with pytest.raises(ConfigError):  # it was no verdict
        asked(shared, form(slow(20 + place)))


def test_the_same_is_looked_at_once(shared: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[Any]()
    really = lanes.Child.ask
    monkeypatch.setattr(lanes.Child, "ask", lambda *given: looked.append(given) or really(*given))

    async def together() -> list[Any]:
        one = form({**USUAL, "title": "twice"})
        return await asyncio.gather(*(shared.of(one, None, None, None) for _ in range(5)))

    assert len({found.grammar for found in asyncio.run(together())}) == 1
    assert len(looked) == 1


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_has_ended_or_hangs_is_started_anew(
    shared: Constraints, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in processes(shared):
        os.kill(pid, sent)
    monkeypatch.setattr(lanes, "PATIENCE", 2.0 - SOON)
    assert asked(shared, form({**USUAL, "title": f"anew {sent}"})).grammar is not None


def test_those_who_wait_are_told_when_the_server_closes() -> None:
    closing = list[bool]()
    made = Constraints(lambda: bool(closing))

    async def waiting() -> None:
        task = asyncio.ensure_future(made.of(form(slow(30)), None, None, None))
        await asyncio.sleep(0.05)
        closing.append(True)
        await task

    try:
        with pytest.raises(ServerClosingError):
            asyncio.run(waiting())
    finally:
        made.close()
    closing.clear()
    with pytest.raises(ClosedError):
        asked(made, form({**USUAL, "title": "too late"}))


@LINUX
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_nothing_is_left_behind(how: str) -> None:
    """Forks that are busy included, whether the server closes them or is killed."""
    script = (
        "import asyncio, sys\n"
        "from medusa_kit.serve.bounded.lanes import Lane, SLOW\n"
        "from medusa_kit.serve.bounded.child import Budget\n"
        "names = {f'p{n}': {'type': 'integer'} for n in range(20000)}\n"
        "form = {'type': 'json_schema', 'json_schema': {'name': 'a', 'schema': "
        "{'type': 'object', 'properties': names}}}\n"
        "lane = Lane(Budget(60, 60, 1 << 30), 4)\n"
        "lane.ask((form, None, None, None))\n"
        "print('begun', flush=True)\n"
        "sys.stdin.readline()\n"
        "lane.close()\n"
        "print('closed', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin, process.stdout:
        assert process.stdout.readline() == "begun\n"
        family = _busy(psutil.Process(process.pid))
        if how == "closed":
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "closed\n"
        else:
            process.kill()
        _, left = psutil.wait_procs(family, timeout=SOON / 2)
        process.kill()
    assert not left


def _busy(server: psutil.Process) -> list[psutil.Process]:
    """The child and its fork, once there is one."""
    until = time.monotonic() + SOON
    while len(family := server.children(recursive=True)) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    return family


@LINUX
def test_children_have_none_of_the_server_s_files() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        bound.set_inheritable(True)
        one = lanes.Child(0)
        try:
            assert one.ask((form(USUAL), None, None, None), lanes.SLOW).kind == "found"
            inside = Path(f"/proc/{one._process.pid}/fd")
            named = [str(path.readlink()) for path in inside.iterdir()]
        finally:
            one.close()
    assert not [name for name in named if name.startswith("socket")]


def test_a_child_is_small() -> None:
    heavy = "torch transformers numpy pydantic fastapi"
    script = f"import sys, {child.__name__}; print(set(sys.modules) & set('{heavy}'.split()))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.stdout.strip() == "set()", told.stderr


def test_a_library_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "llguidance.py").write_text("raise ImportError")
    package = Path(medusa_kit.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setattr(medusa_kit, "__file__", str(tmp_path / "medusa_kit" / "__init__.py"))
    one = lanes.Child(0)
    try:
        answer = one.ask((form(USUAL), None, None, None), lanes.SLOW)
    finally:
        one.close()
    assert answer.kind == "refused"
    assert "llguidance, which is not installed" in answer.value


@pytest.mark.slow
def test_a_schema_that_comes_to_no_end_is_the_request_s_fault(shared: Constraints) -> None:
    """llguidance allows no byte, and sees no error, where multiples have a huge one in common."""
    multiples = [{"multipleOf": number} for number in (9973, 9967, 9949, 9941)]
    asked = form({"type": "integer", "allOf": multiples}, strict=True)
    with pytest.raises(ConfigError, match="schema"):
        asyncio.run(shared.of(asked, None, None, None))
