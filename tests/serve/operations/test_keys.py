"""API keys: where they come from, who is let in, and that nothing shows them."""

import hmac
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from typer.testing import CliRunner

import medusa_kit
from medusa_kit.cli import app
from medusa_kit.errors import ConfigError
from medusa_kit.serve.operations.keys import ApiKeys, KeyMiddleware, load_keys
from medusa_kit.settings.engine_file import read_engine_file

KEYS = ["sk-first-key", "sk-second-key"]


def client() -> TestClient:
    async def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route("/v1/models", hello), Route("/health", hello)])
    app.add_middleware(KeyMiddleware, keys=ApiKeys(KEYS))
    return TestClient(app)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_accepted(key: str) -> None:
    assert client().get("/v1/models", headers={"Authorization": f"bearer {key}"}).text == "hello"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer sk-first-ke")],
        [("Authorization", "Bearer sk-first-key2")],
        [("Authorization", "Bearer ")],
        [("Authorization", "Basic sk-first-key")],
        [("Authorization", "sk-first-key")],
        [("Authorization", "Bearer sk-wrong"), ("Authorization", "Bearer sk-first-key")],
        [("Authorization", b"Bearer \xff\xfe")],
    ],
)
def test_others_get_401_in_the_form_of_openai(headers: list) -> None:
    answer = client().get("/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error["type"] == "authentication_error"
    assert error["code"] == "invalid_api_key"
    assert "sk-" not in answer.text


def test_paths_that_do_not_exist_are_closed_too() -> None:
    assert client().get("/health/../v1/models/x").status_code == 401
    assert client().get("/other").status_code == 401


def test_health_and_the_page_need_no_key() -> None:
    assert client().get("/health").text == "hello"
    assert client().get("/").status_code == 404  # this app has no page
    assert client().get("/page/app.js").status_code == 404
    assert client().post("/health").status_code == 401
    assert client().get("/page/../v1/models").status_code in (401, 404)
    assert client().get("/pages").status_code == 401


def test_every_key_is_compared_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    keys = ApiKeys(KEYS)
    assert keys.accept(b"sk-first-key")
    assert not keys.accept(b"x")
    assert compared == [(32, 32)] * 4  # two for each request, all of one length


def test_keys_come_from_the_environment_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("from-file\n\n  other  \n")
    path.chmod(0o600)
    keys = load_keys(str(path), {"MEDUSA_KIT_API_KEYS": "from-env, from-file"})
    assert keys is not None
    assert len(keys) == 3
    assert all(keys.accept(key) for key in (b"from-file", b"other", b"from-env"))
    assert not keys.accept(b"")
    assert load_keys(None, {}) is None


def test_keys_are_in_no_text_of_the_object() -> None:
    keys = ApiKeys(["sk-secret-key"])
    assert "sk-secret-key" not in repr(keys) + repr(vars(keys))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "no key"), (b"\n \n", "no key"), (b"good\nbad key\n", "key 2"), (b"\xff", "ASCII")],
)
def test_a_file_without_keys_is_an_error(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load_keys(str(path), {})
    assert "bad key" not in str(caught.value)


def test_an_empty_variable_or_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MEDUSA_KIT_API_KEYS has no key"):
        load_keys(None, {"MEDUSA_KIT_API_KEYS": " , "})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(str(tmp_path / "none"), {})


def test_a_file_that_everyone_can_read_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-secret\n")
    path.chmod(0o644)
    load_keys(str(path), {})
    said = capsys.readouterr().err
    assert "chmod 600" in said
    assert "sk-secret" not in said
    path.chmod(0o600)
    load_keys(str(path), {})
    assert capsys.readouterr().err == ""


def test_a_key_file_of_an_engine_file_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model: debug-tiny\nserve: {api_key_file: keys, cors_origin: '*'}\n")
    assert read_engine_file(path).serve == {
        "api_key_file": str((tmp_path / "keys").resolve()),
        "cors_origin": "*",
    }


def test_faulty_keys_end_the_command_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medusa_kit, "load", lambda **_: pytest.fail("loaded"), raising=False)
    done = CliRunner().invoke(app, ["serve", "--api-key-file", str(tmp_path / "none")])
    assert isinstance(done.exception, ConfigError)
    assert "cannot be read" in str(done.exception)
