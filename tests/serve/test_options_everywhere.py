"""Each option is defined once: the command line, engine files, Python, the server and the docs have
its type, default, allowed values and description, and refuse a wrong value in the same words."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import numpy as np
import pytest
import typer
import yaml
from support import option_tables
from support.debug_model import PLAIN
from support.serving.live_server import LiveServer
from support.typed import typed_command

import medusa_kit
from medusa_kit.cli import app
from medusa_kit.cli.parser.panels import shown_kind
from medusa_kit.errors import ConfigError
from medusa_kit.serve.schema import ChatRequest, CompletionRequest
from medusa_kit.settings.engine import EMBEDDED_NAME, all_options
from medusa_kit.settings.engine_file import _Keys, _ServeKeys, read_engine_file
from medusa_kit.settings.option import Option, choices, options_of
from medusa_kit.settings.sampling import NO_FIELDS, SamplingOptions, SamplingParams
from medusa_kit.settings.serve import ServeConfig

SAMPLING, SERVER = options_of(SamplingParams), options_of(ServeConfig)
IN_REQUESTS = {name: option for name, option in SAMPLING.items() if name not in NO_FIELDS}
QUESTION = [{"role": "user", "content": "Why?"}]


def wrong(option: Option) -> Any:
    """A value that this option cannot have."""
    if option.values:
        return f"{option.values[-1]}e"
    assert option.allowed is not None
    assert option.number is not None
    candidates = map(option.number, (-5, 3, 1e5))
    return next(value for value in candidates if not option.allowed.fits(value))


def refused(options: Mapping[str, Option]) -> dict[str, Any]:
    """Wrong values by name, of the options that have any of their own type."""
    return {
        name: wrong(option)
        for name, option in options.items()
        if option.values or (option.number and name != "seed")
    }


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value.message


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    run = typed_command(monkeypatch, capsys)

    def said(command: list[str], name: str, value: Any, *more: str) -> str:
        code, _, err = run(*command, f"--{name.replace('_', '-')}={value}", *more)
        assert code == 2
        return " ".join(err.split())

    return said


def in_a_file(path: Path, raw: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump({"model": "debug-tiny", **raw}))
    return message_of(lambda: read_engine_file(path)).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("command", "options", "own_default"),
    [
        ("generate", SAMPLING, ("temperature",)),
        ("generate", all_options(), ("model",)),
        ("chat", {**SAMPLING, **all_options()}, ("temperature", "model")),
        ("verify", all_options(), ("model", "dtype")),
        (
            "bench",
            {name: one for name, one in all_options().items() if name != "heads"},
            ("model",),
        ),
        ("data generate", IN_REQUESTS, ()),
        ("verify", {name: SAMPLING[name] for name in ("top_k", "top_p", "seed")}, ()),
        ("bench", {name: SAMPLING[name] for name in ("temperature", "seed")}, ()),
        ("serve", SERVER, ()),
    ],
)
def test_commands(command: str, options: Mapping[str, Option], own_default: Any) -> None:
    group: Any = typer.main.get_command(app)
    for word in command.split():
        group = group.commands[word]
    shown = {one.name: one for one in group.params}
    for name, option in options.items():
        if name == "grammar":  # four options of its own
            continue
        assert shown[name].help.startswith(option.description)
        if name not in own_default:
            assert shown[name].default == option.default
        if option.number is not None:
            kind = shown_kind(shown[name], typer.Context(group))
            assert kind.strip("<>") == option.number.__name__


def all_commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield f"{path}{name}", command
        yield from all_commands(command, f"{path}{name} ")


def test_commands_with_some_of_them_have_their_defaults() -> None:
    own = {("verify", "dtype"), ("generate", "temperature"), ("chat", "temperature")}
    for command, found in all_commands(typer.main.get_command(app)):
        for one in found.params:
            option = option_tables.OPTIONS.get(one.name)
            described = option is not None and (one.help or "").startswith(option.description)
            if option is not None and described and (command, one.name) not in own:
                default = EMBEDDED_NAME if option.required else option.default
                assert one.default == default, f"{command} {one.name}"


def test_python() -> None:
    hints = get_type_hints(SamplingOptions)
    assert hints == get_type_hints(SamplingParams)
    assert [one.name for one in dataclasses.fields(SamplingParams)] == list(hints)


def test_files() -> None:
    for options, keys in ((all_options(), _Keys), (SERVER, _ServeKeys)):
        fields = {name: field for name, field in keys.model_fields.items() if name != "serve"}
        assert fields.keys() == options.keys() - {"drafter_options"}
        for name, option in options.items():
            if name not in ("model", "drafter_options"):
                assert fields[name].default == option.default


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_requests(kind: Any) -> None:
    document = kind.model_json_schema()["properties"]
    for name, option in IN_REQUESTS.items():
        field = kind.model_fields[name]
        assert field.default is None
        if option.number is not None:
            assert set(get_args(field.annotation)) == {*choices(option.kind), type(None)}
        assert document[name]["description"] == option.description
    assert not kind.model_fields.keys() & set(NO_FIELDS)


def test_docs() -> None:
    listed: set[str] = set()
    for page, names, found in option_tables.tables():
        assert found == option_tables.table(names), f"{page.name}: run `make fix`"
        listed.update(names)
    assert listed == option_tables.OPTIONS.keys()


@pytest.mark.parametrize(("name", "value"), refused(SAMPLING).items())
def test_wrong_sampling(name: str, value: Any, typed: Any, live: LiveServer) -> None:
    more = {} if name not in ("epsilon", "delta") else {"acceptance": "typical"}
    message = message_of(lambda: SamplingParams.checked({name: value, **more}))
    assert message.startswith(f"{name} {value!r} is ")
    flags = ["--acceptance", "typical"] if more else []
    assert message in typed(["generate", "hi", *PLAIN], name, value, *flags)
    if name in IN_REQUESTS:
        asked = {"model": live.model, "messages": QUESTION, name: value}
        with live.http() as http:
            answer = http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == httpx.codes.BAD_REQUEST
        assert answer.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(("name", "value"), refused(all_options()).items())
def test_wrong_options_of_engines(name: str, value: Any, typed: Any, tmp_path: Path) -> None:
    message = message_of(lambda: medusa_kit.load("debug-tiny", **{name: value}))
    assert message.startswith(f"{name} {value!r} is unknown; expected ")
    assert message in typed(["generate", "hi", "-m", "debug-tiny"], name, value)
    assert in_a_file(tmp_path / "engine.yaml", {name: value}) == message


@pytest.mark.parametrize(("name", "value"), refused(SERVER).items())
def test_wrong_options_of_the_server(name: str, value: Any, typed: Any, tmp_path: Path) -> None:
    message = message_of(lambda: ServeConfig(**{name: value}))
    assert message.startswith(f"{name} {value!r} is ")
    assert message in typed(["serve", "-m", "debug-tiny"], name, value)
    assert in_a_file(tmp_path / "engine.yaml", {"serve": {name: value}}) == message


@pytest.mark.parametrize("name", [name for name, option in SAMPLING.items() if option.number])
def test_a_switch_is_no_number(name: str) -> None:
    """Python takes True for 1."""
    message = message_of(lambda: SamplingParams.checked({name: True}))
    assert message.startswith(f"{name} True is out of range; expected ")


@pytest.mark.parametrize("biases", [{True: 1.0}, {5: True}, {5: "1"}, {"5": 1.0}, {5.0: 1.0}])
def test_biases_are_checked_as_numbers_are(biases: Any) -> None:
    message = message_of(lambda: SamplingParams(logit_bias=biases))
    assert re.match(r"logit_bias .* is out of range; expected (an integer|-100)", message)


def test_biases_are_kept_as_int_and_float() -> None:
    given = {np.int64(5): np.float32(0.5), 7: Fraction(1, 4)}
    kept = SamplingParams(logit_bias=given).logit_bias
    assert kept == {5: 0.5, 7: 0.25}
    assert {(type(token), type(bias)) for token, bias in kept.items()} == {(int, float)}


@pytest.mark.parametrize("name", [name for name, option in SERVER.items() if option.number])
def test_a_refused_number_has_a_hint(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(**{"replicas": 1, name: "1"})
    assert caught.value.hint


@pytest.mark.parametrize("name", ["served_model_name", "heads_hub"])
def test_a_list_holds_text(name: str) -> None:
    message = message_of(lambda: ServeConfig(**{name: [1]}))
    assert message == f"{name} 1 is of type int; expected a list of text"
