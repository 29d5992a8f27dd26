"""Connections leave files for everything else, and nothing is imported late or logged for ever."""

import asyncio
import errno
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.serving.live_server import live_server

from medusa_kit import drafters
from medusa_kit.engine.engine import Engine
from medusa_kit.serve.operations import logs, open_files
from medusa_kit.serve.operations.open_files import QuietAboutFiles

LIMITED = """
    import json, resource
    resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
    from medusa_kit.settings.serve import ServeConfig
    from medusa_kit.serve.operations.open_files import with_room_for_connections
    config = with_room_for_connections(ServeConfig(max_connections={asked}))
    print(json.dumps([config.max_connections, *resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


def limited(soft: int, hard: int, asked: int) -> tuple[list[int], str]:
    code = textwrap.dedent(LIMITED.format(soft=soft, hard=hard, asked=asked))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


def test_the_soft_limit_is_raised_as_far_as_needed() -> None:
    (connections, soft, hard), said = limited(100, 4000, 1024)
    assert (connections, hard, said) == (1024, 4000, "")
    assert 1024 < soft <= 4000


def test_fewer_connections_are_taken_where_the_hard_limit_is_low() -> None:
    (connections, soft, _), said = limited(300, 1024, 1024)
    assert soft == 1024
    assert 500 < connections < 1024
    assert f"max_connections 1024 is lowered to {connections}" in said
    (connections, soft, _), said = limited(300, 1024, 100)
    assert (connections, said) == (100, "")


def test_connections_that_cannot_be_taken_are_told_of_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    others: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.default_exception_handler = others.append  # type: ignore[method-assign]
        loop.set_exception_handler(QuietAboutFiles())
        for _ in range(500):
            full = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler({"message": "accept() failed", "exception": full})
        loop.call_exception_handler({"message": "other", "exception": ValueError()})

    asyncio.run(main())
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [one["message"] for one in others] == ["other"]


def test_an_open_page_is_not_logged(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Writer:
        write = staticmethod(lines.append)

    monkeypatch.setattr(logs, "stderr_writer", Writer)
    with live_server(engine, log_format="plain") as live, live.http() as http:
        for _ in range(3):
            assert http.get("/v1/batch").status_code == 200
        assert http.get("/v1/batch", headers={"Host": "other"}).status_code == 403
        assert http.post("/v1/batch").status_code == 405
    assert ["403" in line or "405" in line for line in lines if "/v1/batch" in line] == [True] * 2


def test_all_drafters_are_imported_before_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module of them that a request could be the first to need."""
    names: list[str] = []
    monkeypatch.setattr(open_files, "import_module", names.append)
    open_files.import_all()
    root = Path(drafters.__file__).parent
    modules = {
        ".".join([drafters.__name__, *path.relative_to(root).with_suffix("").parts])
        for path in root.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert modules < set(names)
    assert "llguidance.hf" in names
