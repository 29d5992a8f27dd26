"""Names of base models: a wrong one is told at once, with the nearest; a folder may be one file."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.gguf.tiny_gguf import write_gguf

from medusa_kit.base import names
from medusa_kit.base.files import gguf_source, resolve
from medusa_kit.base.hub_client import heads_folder
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.names import check_name, near_hint
from medusa_kit.data.readers import read_rows
from medusa_kit.errors import CheckpointError, ConfigError, DataError, HubError


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, and a Hub's cache with one model."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--Some-Model-7B").mkdir()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instuct", "smollm2-135m-instruct"),
        ("org/Some-Model-7", "org/Some-Model-7B"),
        ("Some-Model-7B", "org/Some-Model-7B"),
        ("org/other", None),
    ],
)
def test_wrong_names_without_network_name_the_nearest(
    cut_off: None, wrong: str, near: str | None
) -> None:
    for check in (names.check_name, resolve):
        with pytest.raises(CheckpointError, match="cannot be reached") as caught:
            check(wrong)
        expected = "needs network" if near is None else f"did you mean {near}?"
        assert expected in str(caught.value.hint)


def test_a_hub_that_cannot_be_reached_is_told_once_and_not_asked(
    cut_off: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its client tries each file for half a minute, also those in its cache."""
    names.check_name("org/Some-Model-7B")
    names.check_name("org/Some-Model-7B")
    assert capsys.readouterr().err.count("only what is on this machine is used") == 1
    assert constants.is_offline_mode()
    with pytest.raises(HubError, match=r"nor heads on the Hub: http.* cannot be reached") as caught:
        heads_folder("org/heads", lambda _: [])
    assert caught.value.hint == "check the network"


def test_offline_by_the_environment_stays_so(
    cut_off: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(names, "reached", None)
    assert not names.use_hub_if_reached()
    assert constants.is_offline_mode()


@pytest.mark.parametrize(
    "endpoint",
    ["", "hub.local", "http://", "http://h:99999", "http://h:abc", "http://[::1", "ftp://h"],
)
def test_an_endpoint_that_is_no_address_is_told(
    cut_off: None, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(ConfigError, match=re.escape(f"HF_ENDPOINT {endpoint!r} is no address")):
        names.check_name("org/other")


@pytest.mark.parametrize("written", ["http://{}", "{}", "socks5://{}"])
@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
def test_a_proxy_that_cannot_be_reached_is_no_way_to_the_hub(
    cut_off: None, monkeypatch: pytest.MonkeyPatch, variable: str, written: str
) -> None:
    proxy = constants.ENDPOINT.removeprefix("http://")
    monkeypatch.setenv(variable, written.format(proxy))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        there = f"http://127.0.0.1:{hub.getsockname()[1]}"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert names.reached(there)
        monkeypatch.setenv("no_proxy", "")
        assert not names.reached(there)
        assert not names.reached("http://hub.example")
        monkeypatch.setenv(variable, written.format(there.removeprefix("http://")))
        assert names.reached("http://hub.example")


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/org/Some-Model-7B",
        "huggingface.co/org/Some-Model-7B/tree/main",
        "hf.co/org/Some-Model-7B?library=transformers",
        "http://mirror.example/org/Some-Model-7B/blob/main/model.gguf",
    ],
)
def test_an_address_of_a_model_is_no_name(address: str) -> None:
    with pytest.raises(CheckpointError, match="is an address, not a name") as caught:
        names.check_name(address)
    assert caught.value.hint == "name the model by its id on the Hub: org/Some-Model-7B"


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_told(name: str) -> None:
    with pytest.raises(CheckpointError, match="the name of the model is empty"):
        names.check_name(name)


def test_a_wrong_name_needs_no_library_that_computes() -> None:
    """They take seconds to import."""
    script = (
        "import sys\n"
        "sys.argv = ['medusa-kit', 'generate', 'hi', '-m', 'smollm2-135m-instuct']\n"
        "from medusa_kit import cli\n"
        "try:\n    cli.main()\n"
        "except SystemExit as leaving:\n"
        "    print(leaving.code, {'torch', 'transformers'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "1 set()\n"
    assert "did you mean smollm2-135m-instruct?" in done.stderr


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = write_gguf(folder / "tiny.gguf")
    (folder / "mmproj-tiny.gguf").write_bytes(b"of images")
    assert gguf_source(str(folder)) == file
    assert resolve(str(folder)) == resolve(str(file))
    assert load_base_model(str(folder), device="cpu").info.source == "gguf"


def test_parts_of_a_model_are_one(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"big-{number:05}-of-00002.gguf").touch()
    assert names.model_path(tmp_path).name == "big-00001-of-00002.gguf"


def test_a_folder_with_several_models_names_them(tmp_path: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"holds 2 models: q4\.gguf, q8\.gguf") as caught:
        names.check_name(str(tmp_path))
    assert caught.value.hint == f"name one of them: {tmp_path / 'q4.gguf'}"
    (tmp_path / "config.json").touch()
    assert names.model_path(tmp_path) == tmp_path, "the folder of a model with other formats beside"


def test_what_lies_beside_a_wrong_path_is_offered(tmp_path: Path) -> None:
    there = tmp_path / "chat"
    there.mkdir()
    with pytest.raises(CheckpointError) as caught:
        check_name(str(tmp_path / "chatt"))
    assert caught.value.hint == f"did you mean {there}?"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("smollm-135", "smollm2-135m-instruct"), ("qwen2.5-coder-1.5", "qwen2.5-coder-1.5b-instruct"),
     ("nothing", None), ("s", None)],
)  # fmt: skip
def test_the_beginning_of_a_name_is_enough(name: str, meant: str | None) -> None:
    assert near_hint(name, "look") == (f"did you mean {meant}?" if meant else "look")


@pytest.mark.parametrize(
    "other",
    ["qwen2.5-coder-7b-instruct", "smollm2-1.7b-instruct", "qwen2.5-0.5b-instruct", "Model-7B",
     "org/Some-Model-13B", "Some-Other-Model-70B"],
)  # fmt: skip
def test_another_model_is_not_offered_for_a_typing_error(cut_off: None, other: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be reached") as caught:
        names.check_name(other)
    assert "did you mean" not in str(caught.value.hint)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("smollm2-135m-instuct", "smollm2-135m-instruct"), ("smolm2-135m", "smollm2-135m-instruct"),
     ("qwen2.5-coder-1.5-instruct", "qwen2.5-coder-1.5b-instruct")],
)  # fmt: skip
def test_a_typing_error_has_the_model_that_was_meant(cut_off: None, wrong: str, near: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        names.check_name(wrong)
    assert caught.value.hint == f"did you mean {near}?"


def test_the_variable_that_keeps_the_hub_from_being_asked_is_named(
    cut_off: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for set_one, named in (("1", "TRANSFORMERS_OFFLINE"), (None, "HF_HUB_OFFLINE")):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
        if set_one:
            monkeypatch.setenv("TRANSFORMERS_OFFLINE", set_one)
        said = f"is not asked, since {named} is set"
        for check in (names.check_name, resolve):
            with pytest.raises(CheckpointError, match=said) as caught:
                check("org/other")
            assert caught.value.hint == f"check the path, or unset {named}"
        with pytest.raises(DataError, match=said) as told:
            list(read_rows("org/rows"))
        assert f"unset {named}" in str(told.value.hint)
