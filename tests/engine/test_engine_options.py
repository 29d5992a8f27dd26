"""Each option of an engine is defined once: what takes options takes those of EngineConfig."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

import medusa_kit
from medusa_kit.base.model import BaseModel
from medusa_kit.engine import load as loading
from medusa_kit.errors import ConfigError, DataError, did_you_mean, unknown_value
from medusa_kit.infer.attention.choice import BACKENDS
from medusa_kit.settings import drafters
from medusa_kit.settings.drafter_names import REGISTERED
from medusa_kit.settings.engine import EngineConfig, EngineOptions, all_options, allowed

PACKAGE = Path(medusa_kit.__file__).parent
OBJECTS = ("heads", "tree", "draft_model")  # which Python may give as they are, too
ALL = {name: option for name, option in all_options().items() if name != "model"}


def test_load_takes_the_options_and_their_defaults() -> None:
    signature = inspect.signature(medusa_kit.load).parameters
    taken = {name: one.default for name, one in signature.items() if name != "model"}
    assert taken == {name: option.default for name, option in ALL.items()}
    hints = get_type_hints(inspect.unwrap(medusa_kit.load))
    for name, option in ALL.items():
        if name not in OBJECTS:
            assert hints[name] == option.kind, name
        assert f"{name}: {option.description}" in str(medusa_kit.load.__doc__)


def test_a_file_takes_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {
        "model": "debug-tiny", "revision": "r", "heads": "untrained", "tree": "/t.json",
        "dtype": "float64", "device": "cpu", "weights": "int8", "activations": "int16",
        "attention": "sdpa",
        "fixed_shapes": "always", "compiled": True, "force": True, "drafter": "draft-model",
        "drafter_options": {"max_length": 3}, "draft_model": "debug-tiny", "fallback": "suffix",
        "prefix_cache": "off", "guesses": "all", "check": True, "cache": "float16",
    }  # fmt: skip
    assert given.keys() == all_options().keys()
    written = {name: value for name, value in given.items() if name != "drafter_options"}
    written["drafter"] = {"name": "draft-model", "options": {"max_length": 3}}
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(written))
    seen: list[EngineConfig] = []
    monkeypatch.setattr(loading, "_load", seen.append)
    medusa_kit.load_config(path)
    assert dataclasses.asdict(seen[0]) == given
    medusa_kit.load_config(path, model="other", drafter="none", draft_model=None)
    changed = {"model": "other", "revision": None, "drafter": "none", "drafter_options": None,
               "draft_model": None}  # fmt: skip
    assert dataclasses.asdict(seen[1]) == given | changed
    medusa_kit.load_config(path, name="other", drafter="none", draft_model=None)
    medusa_kit.load(name="other")  # as version 0.1 called it
    assert [dataclasses.asdict(one)["model"] for one in seen[2:]] == ["other", "other"]


def test_no_heads_may_be_a_word_in_python_too(chat_base: BaseModel) -> None:
    for word in ("none", None):
        assert EngineOptions(heads=word).heads is None
        assert loading.build_engine(chat_base, EngineOptions(heads=word)).heads is None


def test_descriptions_name_every_allowed_value() -> None:
    for option in all_options().values():
        for value in option.values:
            assert value in option.description, option.name


def test_what_is_kept_for_each_value_is_kept_for_the_allowed_ones() -> None:
    assert {"auto", *BACKENDS} == set(allowed("attention"))
    assert set(drafters.OPTIONS) < set(REGISTERED) == set(allowed("drafter"))
    assert set(allowed("fallback")) < set(allowed("drafter"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafer": "suffix"}, "no option 'drafer'\nhint: did you mean drafter?"),
        ({"atention": "sdpa"}, "no option 'atention'\nhint: did you mean attention?"),
        ({"zzz": 1}, "no option 'zzz'\nhint: there are: model, heads, tree"),
    ],
)
def test_unknown_keywords_name_the_nearest(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        medusa_kit.load("./nowhere", **given)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [name for name, option in ALL.items() if option.values])
def test_unknown_words_name_the_nearest(name: str) -> None:
    known = allowed(name)
    for wrong, hint in (
        (known[-1] + "e", f"did you mean {known[-1]}?"),
        ("%", f"leave out {name}"),
    ):
        with pytest.raises(ConfigError) as caught:
            medusa_kit.load("./nowhere", **{name: wrong})
        assert caught.value.message.startswith(f"{name} {wrong!r} is unknown; expected ")
        assert known[-1] in caught.value.message
        assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"force": "no"}, "force 'no' is of type str; expected True or False\nhint: force: Use"),
        ({"compiled": 1}, "compiled 1 is of type int; expected True or False"),
        ({"revision": 3}, "revision 3 is of type int; expected text"),
        ({"drafter": "suffix", "drafter_options": [1]},
         "drafter_options [1] is of type list; expected a mapping with options"),
        ({"model": None}, "model None is of type NoneType; expected text\nhint: model: Base model: "
                         "a Hub id, a folder"),
        ({"model": ""}, "model '' is empty\nhint: model: Base model: a Hub id"),
        ({"heads": " "}, "heads ' ' is empty\nhint: heads: Medusa heads: auto (paired"),
    ],
)  # fmt: skip
def test_values_of_another_type_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        medusa_kit.load(**{"model": "debug-tiny", **given})
    assert str(caught.value).startswith(message)


def test_a_path_may_name_a_model() -> None:
    config = EngineConfig(model=Path("a") / "b", draft_model=Path("c"))  # type: ignore[arg-type]
    assert (config.model, config.draft_model) == (str(Path("a") / "b"), "c")


def test_options_of_the_base_are_none_of_an_engine_around_it() -> None:
    own = {one.name for one in dataclasses.fields(EngineConfig)}
    around = {one.name for one in dataclasses.fields(EngineOptions)}
    assert own - around == {"model", "revision", "dtype", "device", "check"}


def test_hints() -> None:
    assert did_you_mean("sufix", ["prefix", "suffix"]) == "did you mean suffix?"
    assert did_you_mean(3, ["prefix"], "leave it out") == "leave it out"
    assert did_you_mean("vLLM", ["tgi", "vllm"]) == "did you mean vllm?"
    assert did_you_mean("llama", ["LLaMA"]) == "did you mean LLaMA?"
    error = unknown_value("role", "usr", ("user", "tool"), kind=DataError)
    assert isinstance(error, DataError)
    assert str(error) == "role 'usr' is unknown; expected user or tool\nhint: did you mean user?"
    three = unknown_value("role", "zzz", ("user", "tool", "system"))
    assert str(three) == "role 'zzz' is unknown; expected one of user, tool, system"


def test_did_you_mean_is_written_once() -> None:
    """In errors.py; schema.py puts the section's name before the nearest key."""
    written = [path.name for path in PACKAGE.rglob("*.py") if "did you mean" in path.read_text()]
    assert sorted(written) == ["errors.py", "schema.py"]
