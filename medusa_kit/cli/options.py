"""Options that several commands share, so that they read the same everywhere.

They are made from the dataclasses of medusa_kit.settings. Commands marked `with_sampling` get the
options of SamplingParams as one dict, with the names of `Engine.generate`.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from medusa_kit.errors import UsageError
from medusa_kit.settings import engine
from medusa_kit.settings.option import Option, choices, options_of
from medusa_kit.settings.sampling import SamplingParams

DEFAULT_MODEL = engine.EMBEDDED_NAME
# What the command line has of its own: (flags, metavar, more help). All else is the option's.
OWN: Mapping[str, tuple[tuple[str, ...], str | None, str]] = {
    "model": (("--model", "-m"), None, ""),
    "force": (("--force",), None, ""),
    "compiled": (("--compile",), None, ""),
    "check": (("--check",), None, ""),
    "drafter": ((), "NAME", ""),
    "draft_model": ((), "MODEL", ""),
    "drafter_options": (
        ("--drafter-option",), "KEY=VALUE",
        " The value is YAML, the key of an inner option staged.drafter; may be repeated.",
    ),
    "logit_bias": ((), "ID=BIAS", " May be repeated."),
}  # fmt: skip


def shown(option: Option, **more: Any) -> Any:
    """An option as Typer declares it."""
    flags, metavar, more_help = OWN.get(option.name, ((), None, ""))
    return typer.Option(*flags, metavar=metavar, help=option.description + more_help, **more)


def parameter(option: Option) -> inspect.Parameter:
    """The parameter of a command that an option is."""
    default = DEFAULT_MODEL if option.required else option.default
    kind = Annotated[_kind(option), shown(option)]  # type: ignore[valid-type]
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(option.name, either, default=default, annotation=kind)


def _kind(option: Option) -> Any:
    """The type of an option for Typer. Words are checked by the dataclass, whose message names the
    nearest; Typer's does not."""
    if option.number is not None or option.kind is bool:
        return option.kind
    if option.kind is str or option.values or str in choices(option.kind):
        return str | None if option.default is None else str
    return list[str] | None


def engine_option(name: str) -> Any:
    """An option of EngineConfig as Typer declares it."""
    return shown(engine.all_options()[name])


Model = Annotated[str, engine_option("model")]
Heads = Annotated[str, engine_option("heads")]
DType = Annotated[str, engine_option("dtype")]
Device = Annotated[str, engine_option("device")]
Activations = Annotated[str, engine_option("activations")]
Force = Annotated[bool, engine_option("force")]
Revision = Annotated[str | None, engine_option("revision")]
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Base model, the same as --model.")
]
EndpointModel = Annotated[
    str | None,
    typer.Option(
        "--endpoint-model", metavar="NAME", help="The model's name there; default: that of --model."
    ),
]
PROMPTS = (
    "a file (JSONL, JSON, text, parquet ...), - for a pipe, or a data set, NAME or "
    "NAME/CONFIG:SPLIT"
)
Limit = Annotated[int | None, typer.Option(min=1, help="Take this many prompts; default: all.")]


def output_option(what: str) -> Any:
    """The option for where a command writes, which has the same name everywhere."""
    return typer.Option("--output", "-o", help=what)


def prompts_option(more: str = "") -> Any:
    """The option for a command's prompts, which has the same name everywhere. `more`: begins with
    "; "."""
    return typer.Option("--prompts", help=f"Prompts: {PROMPTS}{more}.")


def either(name: str, argument: Any, option: str, given: Any) -> Any:
    """The value that an argument and an option of the same meaning give; None where neither does.

    Raises UsageError where they differ.
    """
    if argument is not None and given is not None and argument != given:
        raise UsageError(
            f"{name} {argument!r} and {option} {given!r} are the same thing and differ",
            hint="give one of them",
        )
    return given if argument is None else argument


MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer, in tokens.")
]
CONSTRAINTS = ("json_schema", "regex", "lark", "choice")
Sampling = Mapping[str, Any]
GIVEN: Sampling = MappingProxyType({})  # a placeholder for the sampling options


def _constraining(
    json_schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The answer is JSON that fits the schema in FILE."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="A regular expression that the whole answer matches.")
    ] = None,
    lark: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer follows the grammar in FILE.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="A possible answer; repeat for each of the others.")
    ] = None,
) -> dict[str, Any]:
    from medusa_kit.settings.grammar import Grammar

    given = {name: value for name, value in locals().items() if name in CONSTRAINTS and value}
    if len(given) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{names} contradict each other", hint="give one of them")
    if json_schema:
        return {"grammar": Grammar.json_schema(_read(json_schema))}
    if lark:
        return {"grammar": Grammar.lark(_read(lark))}
    if regex:
        return {"grammar": Grammar.regex(regex)}
    return {"grammar": Grammar.choices(choice) if choice else None}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", hint="give the name of a file of text in UTF-8"
        ) from None


def _parsed_bias(items: list[str]) -> dict[int, float] | None:
    bias = dict[int, float]()
    for item in items:
        token, _, value = item.partition("=")
        try:
            number, added = int(token), float(value)
        except ValueError:
            raise UsageError(
                f"logit bias {item!r} is not understood; expected ID=BIAS",
                hint="for instance --logit-bias 42=-100",
            ) from None
        if bias.setdefault(number, added) != added:
            raise UsageError(
                f"logit bias {item!r} contradicts {number}={bias[number]:g}; expected one for each "
                "token",
                hint="leave one of them out",
            )
    return bias or None


def with_sampling(
    without: Collection[str] = (),
    only: Collection[str] | None = None,
    temperature_of_model: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `sampling` by the options of SamplingParams.

    `without`: those that it has not. `only`: those that it has. `temperature_of_model`: the
    temperature is None unless given, for a command whose default depends on the model.
    """
    table = options_of(SamplingParams)
    names = [name for name in only or table if name not in without]
    added = [parameter(table[name]) for name in names if name != "grammar"]
    if temperature_of_model:
        added = [_open_temperature(one) if one.name == "temperature" else one for one in added]
    grammars = inspect.signature(_constraining).parameters if "grammar" in names else {}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            sampling = {one.name: arguments.pop(one.name) for one in added}
            if "logit_bias" in sampling:
                sampling["logit_bias"] = _parsed_bias(sampling["logit_bias"] or [])
            if grammars:
                sampling |= _constraining(**{name: arguments.pop(name) for name in grammars})
            SamplingParams.checked(sampling)  # errors come before a model loads
            if sampling.get("grammar") is not None:
                from medusa_kit.infer.decode.grammars.check import check_grammar

                check_grammar(sampling["grammar"])
            command(**arguments, sampling=sampling)

        shown = parameters_with(command, "sampling", [*added, *grammars.values()])
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return run

    return decorate


def parameters_with(
    command: Callable[..., None], name: str, shown: Sequence[inspect.Parameter]
) -> list[inspect.Parameter]:
    """A command's parameters, with `shown` in place of the one of this name."""
    parameters = list(inspect.signature(command).parameters.values())
    index = next(i for i, parameter in enumerate(parameters) if parameter.name == name)
    parameters[index : index + 1] = shown
    return parameters


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option was really given, rather than left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _open_temperature(parameter: inspect.Parameter) -> inspect.Parameter:
    open_one = shown(
        options_of(SamplingParams)["temperature"], show_default="the model's own, else 0"
    )
    return parameter.replace(default=None, annotation=Annotated[float | None, open_one])


def heads_argument(heads: str) -> str | None:
    """The argument `heads` of `medusa_kit.load` for the option `--heads`."""
    return None if heads == "none" else heads
