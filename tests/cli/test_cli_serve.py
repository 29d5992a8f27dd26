"""`medusa-kit serve` as a command: what it is started from, what it refuses, how it ends."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.debug_model import MODEL

from medusa_kit import console
from medusa_kit.errors import ConfigError
from medusa_kit.serve import server
from medusa_kit.serve.server import address_for_others, first_lines
from medusa_kit.settings.engine_file import read_engine_file
from medusa_kit.settings.option import options_of
from medusa_kit.settings.serve import ServeConfig

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that something listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("medusa_kit.load", load)


@pytest.mark.usefixtures("no_model")
def test_an_address_that_cannot_be_had_is_told_before_the_model_loads(run: Run, taken: int) -> None:
    for given, said in (
        (["--port", str(taken)], "in use"),
        (["--host", "192.0.2.1", "--port", "0"], "cannot listen on 192.0.2.1"),
        (["--port", "70000"], "0 to 65535"),
        (["--max-rows", "0"], "max_rows 0"),
        (["--served-model-name", "gpt", "--served-model-name", " "], "served_model_name ' '"),
        (["--request-timeout", "nan"], "request_timeout nan"),
        (["--heads-memory", "0"], "heads_memory 0"),
        (["--replicas", "0"], "replicas 0"),
        (["--max-replicas", "3"], "max_replicas has no effect without replicas"),
        (["--heads-dir", "no/such/folder"], "'no/such/folder' does not exist"),
        (["--heads-hub", "org/heads", "--heads-hub", "no name"], "no name"),
    ):
        code, _, err = run("serve", *MODEL, *given)
        assert code == 2
        assert said in err


@pytest.mark.usefixtures("no_model")
def test_the_extra_is_named_where_it_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "medusa_kit.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = run("serve", *MODEL)
    assert code == 2
    assert "'.[serve]'" in err


@pytest.mark.usefixtures("no_model")
def test_ray_is_named_where_it_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("serve", *MODEL, "--replicas", "2")
    assert code == 2
    assert "'.[ray]'" in err


@pytest.mark.usefixtures("no_model")
def test_a_cluster_that_cannot_be_reached_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with socket.socket() as silent:  # bound, but nobody listens
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        code, _, err = run("serve", *MODEL, "--replicas", "2", "--ray-address", address)
    assert code == 2
    assert f"ray_address '{address}' cannot be reached" in err


def test_from_a_file_until_sigterm(
    run: Run, tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves, and a signal ends it with status 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = tmp_path / "engine.yaml"
    file.write_text(
        "model: debug-tiny\nheads: none\ndevice: cpu\n"
        f"serve:\n  port: {taken}\n  max_rows: 2\n  max_queue: 3\n"
    )
    told: dict[str, Any] = {}

    def ask() -> None:
        for tries in range(1, 600):
            try:
                told["batch"] = httpx.get(f"http://127.0.0.1:{port}/v1/batch").json()
                told["tries"] = tries
                break
            except httpx.TransportError:
                threading.Event().wait(0.05)
        if told:  # else there is no server, and so nobody who takes the signal
            os.kill(os.getpid(), signal.SIGTERM)

    asking, note = threading.Thread(target=ask), console.note

    def noted(text: str) -> None:
        note(text)
        if text.startswith("serving"):  # from when on it takes connections
            asking.start()
            asking.join(0.5)

    monkeypatch.setattr(console, "note", noted)
    code, out, err = run("serve", "--config", str(file), "--port", str(port))
    asking.join()
    assert code == 0, err
    assert told["tries"] == 1
    assert told["batch"]["max_rows"] == 2
    assert f"at http://127.0.0.1:{port}/v1 (" in err
    assert f"chat page: http://127.0.0.1:{port}/ " in err
    assert out == ""


@pytest.mark.parametrize(
    ("host", "page"), [("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]"), ("10.0.0.7", "10.0.0.7")]
)
def test_the_page_has_an_address_that_a_browser_can_open(host: str, page: str) -> None:
    said = first_lines("m", f"http://{host}:80", "8 requests at once")
    assert f"at http://{host}:80/v1 (" in said
    assert f"chat page: http://{page}:80/ " in said


def test_other_machines_are_told_an_address_that_they_can_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the server listens on all of this machine's addresses, and it has a network."""
    monkeypatch.setattr(server, "address_for_others", lambda version_6: "10.0.0.7")
    assert "from other machines: http://10.0.0.7:80/" in first_lines("m", "http://0.0.0.0:80", "")
    assert "other machines" not in first_lines("m", "http://127.0.0.1:80", "")
    monkeypatch.setattr(server, "address_for_others", lambda version_6: None)
    assert "other machines" not in first_lines("m", "http://0.0.0.0:80", "")


def test_the_address_for_others_is_one_of_this_machine() -> None:
    for version_6 in (False, True):
        found = address_for_others(version_6)
        if found is not None:
            socket.create_server((found.strip("[]"), 0), family=(
                socket.AF_INET6 if version_6 else socket.AF_INET
            )).close()  # fmt: skip


def test_the_section_of_an_engine_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model: m\nserve:\n  port: 9000\n  request_timeout: 5\n")
    file = read_engine_file(path)
    assert file.serve == {"port": 9000, "request_timeout": 5}
    assert file.arguments() == {"model": "m"}  # what `load` takes
    path.write_text("model: m\nserve:\n  heads_dir: heads\n  heads_hub: [org/a, org/b@main]\n")
    folder = str(tmp_path / "heads")
    assert read_engine_file(path).serve == {
        "heads_dir": folder,
        "heads_hub": ["org/a", "org/b@main"],
    }
    for section, said in (
        ("prot: 1", "serve.port"),
        ("port: many", "serve.port"),
        ("port: true", "serve.port = true: expected a number"),
        ("port: 99999", "0 to 65535"),
        ("heads_hub: org/heads", "serve.heads_hub"),
        ("heads_memory: -1", "heads_memory -1"),
    ):
        path.write_text(f"model: m\nserve:\n  {section}\n")
        with pytest.raises(ConfigError, match=said):
            read_engine_file(path)


def test_every_option_is_described() -> None:
    defaults = ServeConfig()
    for name, option in options_of(ServeConfig).items():
        assert option.description.endswith(".")
        assert getattr(defaults, name) == option.default
