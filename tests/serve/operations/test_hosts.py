"""Pages of other sites cannot call a server of this machine by a name of their own."""

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from support.serving.live_server import live_server

from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError
from medusa_kit.serve.operations.guard import guard
from medusa_kit.serve.operations.hosts import host_of, is_loopback
from medusa_kit.serve.operations.keys import ApiKeys
from medusa_kit.serve.operations.metrics import Metrics
from medusa_kit.settings.serve import ServeConfig

LOCAL = ["localhost", "localhost:8000", "LocalHost.", "127.0.0.1:1", "127.0.0.1", "[::1]:8000",
         "[0:0:0:0:0:0:0:1]"]  # fmt: skip
OTHERS = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
          "localhost@evil.example", "evil.example@localhost", "localhost:80:80", "127.0.0.2",
          "[::2]", "0.0.0.0", "localhost, evil.example", "", "[::1", "localhost/x"]  # fmt: skip


def answered(name: str, keys: bool = False, **options: Any) -> httpx.Response:
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"))])
    config = ServeConfig(log_format="none", **options)
    guard(app, config, ApiKeys(["sk-a"]) if keys else None, Metrics(), config.host)
    headers = {"Host": name, "Authorization": "Bearer sk-a"}
    return TestClient(app).get("/", headers=headers)


@pytest.mark.parametrize("host", LOCAL)
def test_local_names_are_answered(host: str) -> None:
    assert answered(host).text == "hello"


@pytest.mark.parametrize("host", OTHERS)
def test_others_are_refused_and_told_the_option(host: str) -> None:
    answer = answered(host)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize(
    ("host", "options", "status"),
    [
        ("chat.example", {"allowed_hosts": "other.example, chat.example"}, 200),
        ("CHAT.example:443", {"allowed_hosts": "chat.example"}, 200),
        ("a.chat.example", {"allowed_hosts": "chat.example"}, 403),
        ("evil.example", {"allowed_hosts": "*"}, 200),
        ("[fe80::1]", {"allowed_hosts": "fe80::1"}, 200),
        ("127.0.0.2:80", {"host": "127.0.0.2"}, 200),
        ("127.0.0.3", {"host": "127.0.0.2"}, 403),
        ("evil.example", {"host": "localhost"}, 403),
        ("evil.example", {"host": "::1"}, 403),
        ("evil.example", {"keys": True}, 200),  # it would not have the key
        ("evil.example", {"host": "0.0.0.0"}, 200),
        ("evil.example", {"host": "0.0.0.0", "allowed_hosts": "chat.example"}, 403),
        ("evil.example", {"keys": True, "allowed_hosts": "chat.example"}, 403),
        ("chat.example", {"keys": True, "allowed_hosts": "chat.example"}, 200),
    ],
)
def test_who_is_asked_by_which_name(host: str, options: dict[str, Any], status: int) -> None:
    assert answered(host, **options).status_code == status


@pytest.mark.parametrize("wrong", ["", " , ", "https://a.example", "a.example:80", "a/b", "a b"])
def test_names_that_are_none(wrong: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServeConfig(allowed_hosts=wrong)


def test_addresses() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "example"):
        assert not is_loopback(host)
    assert host_of("[::1]:80") == "[::1]"
    assert host_of("a:b") is None


def test_a_server_behind_nginx(engine: Engine) -> None:
    """With the headers that docs/deploy.md has nginx send."""
    sent = {
        "Host": "chat.example.com", "X-Forwarded-For": "203.0.113.9",
        "X-Forwarded-Proto": "https", "X-Forwarded-Host": "localhost",
    }  # fmt: skip
    asked = {"prompt": "a", "max_tokens": 2}
    for allowed, status in ((None, 403), ("chat.example.com", 200)):
        with live_server(engine, allowed_hosts=allowed) as live, live.http() as http:
            for path in ("/", "/health", "/v1/models"):
                assert http.get(path, headers=sent).status_code == status
            body = {"model": live.model, **asked}
            assert http.post("/v1/completions", json=body, headers=sent).status_code == status
            assert http.get("/health").status_code == 200  # of this machine
