"""An engine in a YAML file: base model, heads, drafter, and how they run and are served.

`medusa_kit.load_config` and every command with `--config` read it. Its keys are the options of
EngineConfig, with a section for the drafter and its options, and a section `serve` with options of
ServeConfig. Unknown keys are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, create_model

from medusa_kit.errors import ConfigError
from medusa_kit.paths import beside, expanded
from medusa_kit.settings.drafters import check_drafting
from medusa_kit.settings.engine import (
    HEADS_WORDS,
    OWN_MODELS,
    all_options,
    check_fixed_shapes,
    check_value,
)
from medusa_kit.settings.option import Option, options_of
from medusa_kit.settings.schema import Section, explain, read_yaml
from medusa_kit.settings.serve import ServeConfig

MODELS = ("model", "heads", "draft_model")  # what may be a folder beside the file
MODEL_OPTIONS = ("draft_model",)  # of drafters: models, and files that may not be there yet
FILE_OPTIONS = ("store",)
SERVE_FILES = ("api_key_file", "heads_dir")
# Another model has no use for the revision of the file's, and so on.
BELONGS = {"model": "revision", "heads": "tree", "drafter": "drafter_options"}


class DrafterSection(Section):
    """Who drafts tokens; a plain name means its default options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)  # those of medusa_kit.settings.drafters


def _with_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):  # which Python takes for a number
        raise ValueError(f"{str(value).lower()} is no value; no option of the server is a switch")
    return value


def _kind(option: Option) -> Any:
    """What pydantic checks: types, for which YAML has its own hints. Words are checked as Python
    checks them."""
    return Any if option.values else option.kind


def _serve_keys() -> dict[str, Any]:
    return {
        option.name: (Annotated[_kind(option), BeforeValidator(_no_switch)], option.default)
        for option in options_of(ServeConfig).values()
    }


_ServeKeys: type[Section] = create_model("_ServeKeys", __base__=Section, **_serve_keys())


def _keys() -> dict[str, Any]:
    """(type, default) of each key."""
    keys = {option.name: (_kind(option), ... if option.required else option.default)
            for option in all_options().values() if option.name != "drafter_options"}  # fmt: skip
    drafter = Annotated[DrafterSection | None, BeforeValidator(_with_name)]
    return keys | {"drafter": (drafter, None), "serve": (_ServeKeys | None, None)}


_Keys: type[Section] = create_model("_Keys", __base__=Section, **_keys())


@dataclass(frozen=True)
class EngineFile:
    """The options that a file gives, by the names of EngineConfig; relative paths are looked up
    beside it. `serve`: by the names of ServeConfig."""

    given: Mapping[str, Any]
    serve: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the file gives, as arguments of `medusa_kit.load`.

        `changes` win, and what belongs to something they replace is left out.
        """
        arguments = dict(self.given)
        if arguments.get("heads") == "none":
            arguments["heads"] = None
        for key in BELONGS.keys() & (changes or {}).keys():
            if arguments.get(key) != (changes or {})[key]:
                arguments.pop(BELONGS[key], None)
        return arguments | dict(changes or {})


def read_engine_file(path: str | Path) -> EngineFile:
    """The engine that the file at `path` describes.

    Raises ConfigError: no such file, no YAML, an unknown key, drafter or option, a wrong value.
    """
    path = expanded(path)
    raw = read_yaml(path, "engine file")
    if raw.get("heads", "") is None:
        raise ConfigError(f"{path}: heads = null: expected text", hint="write none")
    try:
        keys = _Keys.model_validate(raw)
    except ValidationError as error:
        raise explain(error, str(path), _Keys) from error
    options = {name: getattr(keys, name) for name in keys.model_fields_set}
    if (drafter := options.get("drafter")) is not None:
        options |= {"drafter": drafter.name, "drafter_options": drafter.options}
    served = options.pop("serve", None)
    serve = {name: getattr(served, name) for name in served.model_fields_set} if served else {}
    try:
        _check_options(options)
        ServeConfig(**serve)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from error
    files = {name: _file(serve[name], path.parent) for name in SERVE_FILES if serve.get(name)}
    return EngineFile(_resolved(options, path.parent), serve | files)


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        check_value(name, value)
    check_fixed_shapes(options.get("fixed_shapes", "auto"), options.get("compiled", False))
    check_drafting(
        options.get("drafter"),
        options.get("drafter_options"),
        options.get("draft_model") is not None,
        options.get("fallback"),
    )


def _resolved(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    result = dict(options)
    for name in MODELS:
        if result.get(name) is not None:
            result[name] = _model_path(result[name], folder)
    if result.get("tree") is not None:
        result["tree"] = _file(result["tree"], folder)
    if result.get("drafter_options"):
        result["drafter_options"] = _resolved_options(result["drafter_options"], folder)
    return result


def _model_path(name: str, folder: Path) -> str:
    """A model or heads beside the file; else the name as it is, such as one on the Hub."""
    if name in HEADS_WORDS or name in OWN_MODELS:
        return name
    return _file(name, folder) if name.startswith((".", "~")) else beside(name, folder)


def _file(name: str, folder: Path) -> str:
    return str((folder / expanded(name)).resolve())


def _resolved_options(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A drafter's options with absolute paths, those of its sources included."""
    result = dict(options)
    for key, value in options.items():
        if isinstance(value, Mapping):
            result[key] = _resolved_options(value, folder)
        elif isinstance(value, str) and key in MODEL_OPTIONS + FILE_OPTIONS:
            result[key] = (_model_path if key in MODEL_OPTIONS else _file)(value, folder)
    return result
