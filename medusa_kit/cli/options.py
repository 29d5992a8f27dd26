"""Options that several commands share, so that they read the same everywhere.

A sampling option is defined once, in `_drawing`, `_accepting` or `_constraining`. Commands marked
`with_sampling` get all of them as one dict, with the names of `Engine.generate`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from medusa_kit.errors import UsageError
from medusa_kit.settings import engine

DEFAULT_MODEL = engine.EMBEDDED_NAME
# What the command line has of its own: (flags, metavar, more help). All else is EngineConfig's.
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
}  # fmt: skip


def engine_option(name: str) -> Any:
    """An option of EngineConfig as Typer declares it."""
    flags, metavar, more = OWN.get(name, ((), None, ""))
    help_text = engine.all_options()[name].description + more
    return typer.Option(*flags, metavar=metavar, help=help_text)


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
Temperature = Annotated[float, typer.Option(help="0 is greedy; above 0 samples, exactly.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the K likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample within this share of probability.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text in float32, whatever the tree.")]
CONSTRAINTS = ("json_schema", "regex", "lark", "choice")
Sampling = Mapping[str, Any]
GIVEN: Sampling = MappingProxyType({})  # a placeholder for the sampling options


def _drawing(
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep tokens at least this fraction as likely as the likeliest one."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1 discourages tokens of prompt and answer; default: the model's own."
        ),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken from the logits of tokens the answer has (-2 to 2).")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same for each time the answer has them (-2 to 2).")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=BIAS", help="Added to a token's logit; may be repeated."),
    ] = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    return {**locals(), "logit_bias": _parsed_bias(logit_bias or [])}


def _accepting(
    acceptance: Annotated[
        str,
        typer.Option(help="exact, or typical (LOSSY: takes draft tokens that are likely enough)."),
    ] = "exact",
    epsilon: Annotated[
        float | None,
        typer.Option(help="typical: accept draft tokens likelier than this; default: 0.09."),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="typical: and those above this times exp(-entropy); default: sqrt(epsilon)."
        ),
    ] = None,
) -> dict[str, Any]:
    return dict(locals())


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
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _parsed_bias(items: list[str]) -> dict[int, float] | None:
    bias = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise UsageError(
                f"logit bias {item!r} is not understood; expected ID=BIAS",
                hint="for instance --logit-bias 42=-100",
            ) from None
    return bias or None


def with_sampling(
    acceptance: bool = True, temperature_of_model: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `sampling` by the sampling options.

    `acceptance`: whether the rule can be chosen too, and a grammar. `temperature_of_model`: the
    temperature is None unless given, for a command whose default depends on the model.
    """
    groups: list[Callable[..., dict[str, Any]]] = [_drawing]
    if acceptance:
        groups += [_accepting, _constraining]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            sampling: dict[str, Any] = {}
            for group in groups:
                names = inspect.signature(group).parameters
                sampling |= group(**{name: arguments.pop(name) for name in names})
            from medusa_kit.settings.sampling import SamplingParams

            SamplingParams.checked(sampling)  # errors come before a model loads
            if sampling.get("grammar") is not None:
                from medusa_kit.infer.decode.grammars.check import check_grammar

                check_grammar(sampling["grammar"])
            command(**arguments, sampling=sampling)

        added = [
            parameter
            for group in groups
            for parameter in inspect.signature(group).parameters.values()
        ]
        shown = parameters_with(command, "sampling", added)
        if temperature_of_model:
            shown = [
                _open_temperature(parameter) if parameter.name == "temperature" else parameter
                for parameter in shown
            ]
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
    shown = typer.Option(
        help="0 is greedy; above 0 samples, exactly.", show_default="the model's own, else 0"
    )
    return parameter.replace(default=None, annotation=Annotated[float | None, shown])


def heads_argument(heads: str) -> str | None:
    """The argument `heads` of `medusa_kit.load` for the option `--heads`."""
    return None if heads == "none" else heads
