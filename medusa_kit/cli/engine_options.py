"""Options that say which engine a command runs: base model, heads, drafter, where and how.

They are made from EngineConfig (medusa_kit.settings.engine). Commands marked `with_engine` get all
of them as one dict, the arguments of `medusa_kit.load`. A file (`--config`) can give them too;
options that were really given win over it.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit.base.names import check_name
from medusa_kit.cli import options
from medusa_kit.errors import UsageError
from medusa_kit.settings import engine

PARAMETER = "loading"  # the parameter that stands where the options go
GIVEN_NAMES = "given_names"
ARGUMENT = "model_argument"

Loading = Mapping[str, Any]
GIVEN: Loading = options.GIVEN


Config = Annotated[
    Path | None,
    typer.Option(help="Engine file (YAML, see recipes/engines/); options given here win."),
]


def _parameters() -> list[inspect.Parameter]:
    """The parameters of a command: the file, then every option of EngineConfig."""
    made = (options.parameter(option) for option in engine.all_options().values())
    return [_parameter("config", Config, None), *made]


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, either, annotation=kind, default=default)


def with_engine(
    several: bool = False,
    dtype: str = "auto",
    argument: bool = True,
    only: Collection[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put the engine's options where a command has its parameter `loading`.

    `dtype`: the default of the command. `several`: for a command that compares heads and drafters,
    with a `--heads` of its own. Its parameter GIVEN_NAMES, if it has one, gets the names of all its
    options that were really given. `argument`: whether the model may be an argument too. `only`:
    the options that the command has, where it does not decode.
    """
    shown = [parameter.replace(default=dtype) if parameter.name == "dtype" else parameter
             for parameter in _parameters() if (parameter.name != "heads" or not several)
             and (only is None or parameter.name in only)]  # fmt: skip

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(context: typer.Context, **arguments: Any) -> None:
            values = {parameter.name: arguments.pop(parameter.name) for parameter in shown}
            model = arguments.pop(ARGUMENT, None)
            names = {name for name in (*values, *arguments) if options.was_given(context, name)}
            if model is not None:
                by_option = values["model"] if "model" in names else None
                values["model"] = options.either("MODEL", model, "--model", by_option)
                names.add("model")
            given = names & values.keys()
            loading = _arguments(values, given)
            if "draft_model" in given and not several:
                _check_draft_model_is_used(loading)
            if "model" in loading:
                check_name(loading["model"])
                _begin_digest(loading["model"])
            passed = {GIVEN_NAMES: names} if GIVEN_NAMES in own_parameters else {}
            command(**arguments, **{PARAMETER: loading}, **passed)

        own_parameters = inspect.signature(command).parameters
        first = [_parameter(ARGUMENT, options.ModelArgument, None)] if argument else []
        all_parameters = options.parameters_with(command, PARAMETER, [*first, *shown])
        parameters = [parameter for parameter in all_parameters if parameter.name != GIVEN_NAMES]
        context = inspect.Parameter(
            "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        )
        run.__signature__ = inspect.Signature([*parameters, context])  # type: ignore[attr-defined]
        return run

    return decorate


def _begin_digest(model: str) -> None:
    """While the command imports what it needs."""
    from medusa_kit.base.own_models import begin_digest  # --help needs none of it

    begin_digest(model)


def _arguments(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Arguments of `medusa_kit.load`: options given, else the file's, else the defaults."""
    from medusa_kit.settings.drafters import check_drafting

    config, items = values.pop("config"), values.pop("drafter_options", None) or []
    changes = _named({name: values[name] for name in values if name in given})
    result = _named(values) | (_of_file(config, changes) if config is not None else {})
    result["drafter_options"] = _drafter_options(result.get("drafter_options") or {}, items)
    check_drafting(
        result.get("drafter"),
        result["drafter_options"],
        result.get("draft_model") is not None,
        result.get("fallback"),
    )
    return result


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options in the words of `medusa_kit.load`."""
    result = dict(values)
    if "heads" in result:
        result["heads"] = options.heads_argument(result["heads"])
    return result


def _of_file(path: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    from medusa_kit.settings.engine_file import read_engine_file

    return read_engine_file(path).arguments(changes)


def _drafter_options(from_file: Mapping[str, Any], items: list[str]) -> dict[str, Any]:
    from medusa_kit.settings.schema import apply_override

    result = copy.deepcopy(dict(from_file))
    for item in items:
        apply_override(result, item, "drafter option", "KEY=VALUE", "--drafter-option num_nodes=12")
    return result


def _check_draft_model_is_used(loading: Mapping[str, Any]) -> None:
    from medusa_kit.settings.drafters import READ_DRAFT_MODEL

    drafters = {loading["drafter"], loading.get("fallback")}
    if loading["drafter"] is not None and not drafters & set(READ_DRAFT_MODEL):
        raise UsageError(
            f"drafter {loading['drafter']} does not use the draft model {loading['draft_model']!r}",
            hint=f"--drafter {' or '.join(READ_DRAFT_MODEL)} does",
        )
