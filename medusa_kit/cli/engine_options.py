"""Options that say which engine a command runs: base model, heads, drafter, where and how.

Commands marked `with_engine` get all of them as one dict, the arguments of `medusa_kit.load`. A
file (`--config`) can give them too; options that were really given win over it.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit.cli import options
from medusa_kit.errors import UsageError

# medusa_kit.settings.drafters has the same, but --help must not wait for what it imports.
DRAFTERS = ("auto", "medusa", "draft-model", "prompt-lookup", "suffix", "lookahead", "recycling",
            "combined", "none")  # fmt: skip
PLACE = "loading"  # the parameter that stands where the options go
GIVEN_NAMES = "given_names"

Loading = Mapping[str, Any]
GIVEN: Loading = options.GIVEN


def _engine(
    config: Annotated[
        Path | None,
        typer.Option(help="Engine file (YAML, see recipes/engines/); options here win over it."),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    heads: options.Heads = "auto",
    tree: options.Tree = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Who guesses ahead: {', '.join(DRAFTERS[:-1])} or none (plain decoding); "
            "heads where there are any unless given.",
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A smaller model, for drafters that use one."),
    ] = None,
    drafter_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Of the drafter, value read as YAML, staged.drafter=suffix for inner ones; may be "
            "repeated.",
        ),
    ] = None,
    dtype: options.DType = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "checkpoint",
    attention: options.Attention = "auto",
    fixed_shapes: options.FixedShapes = "auto",
    compiled: options.Compile = False,
    force: options.Force = False,
) -> None:
    """The options themselves; `_arguments` is what becomes of them."""


def with_engine(
    several: bool = False, dtype: str = "auto"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put the engine's options where a command has its parameter `loading`.

    `dtype`: the default of the command. `several`: for a command that compares heads and drafters,
    with a `--heads` of its own. Its parameter GIVEN_NAMES, if it has one, gets the names of all its
    options that were really given.
    """
    shown = [one.replace(default=dtype) if name == "dtype" else one
             for name, one in inspect.signature(_engine).parameters.items()
             if name != "heads" or not several]  # fmt: skip

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(context: typer.Context, **arguments: Any) -> None:
            values = {one.name: arguments.pop(one.name) for one in shown}
            names = {name for name in (*values, *arguments)
                     if (source := context.get_parameter_source(name)) is not None
                     and source.name != "DEFAULT"}  # fmt: skip
            given = names & values.keys()
            loading = _arguments(values, given)
            if "draft_model" in given and not several:
                _check_draft_model_is_used(loading)
            told = {GIVEN_NAMES: names} if GIVEN_NAMES in wanted else {}
            command(**arguments, **{PLACE: loading}, **told)

        wanted = inspect.signature(command).parameters
        parameters = [one for name, one in wanted.items() if name != GIVEN_NAMES]
        at = next(i for i, one in enumerate(parameters) if one.name == PLACE)
        parameters[at : at + 1] = shown
        context = inspect.Parameter(
            "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        )
        run.__signature__ = inspect.Signature([*parameters, context])  # type: ignore[attr-defined]
        return run

    return decorate


def _arguments(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Arguments of `medusa_kit.load`: options given, else the file's, else the defaults."""
    from medusa_kit.settings.drafters import check_drafting

    config, items = values.pop("config"), values.pop("drafter_option") or []
    changes = _named({name: values[name] for name in values if name in given})
    result = _named(values) | (_of_file(config, changes) if config is not None else {})
    result["drafter_options"] = _drafter_options(result.get("drafter_options") or {}, items)
    check_drafting(
        result["drafter"],
        result["drafter_options"],
        result["draft_model"] is not None,
        result.get("fallback"),
    )
    return result


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the names and in the words of `medusa_kit.load`."""
    result = {"name" if name == "model" else name: value for name, value in values.items()}
    if "heads" in result:
        result["heads"] = options.heads_argument(result["heads"])
    return result


def _of_file(path: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    from medusa_kit.settings.engine import read_engine_config

    return read_engine_config(path).arguments(changes)


def _drafter_options(told: Mapping[str, Any], items: list[str]) -> dict[str, Any]:
    from medusa_kit.settings.schema import apply_override

    result = copy.deepcopy(dict(told))
    for item in items:
        apply_override(result, item, "drafter option", "KEY=VALUE", "--drafter-option num_nodes=12")
    return result


def _check_draft_model_is_used(loading: Mapping[str, Any]) -> None:
    from medusa_kit.settings.drafters import READ_DRAFT_MODEL

    who = {loading["drafter"], loading.get("fallback")}
    if loading["drafter"] is not None and not who & set(READ_DRAFT_MODEL):
        raise UsageError(
            f"drafter {loading['drafter']} does not use the draft model {loading['draft_model']!r}",
            hint=f"--drafter {' or '.join(READ_DRAFT_MODEL)} does",
        )
