"""`medusa-kit data`: make training data from prompts, and look at it."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.base.names import check_name
from medusa_kit.cli import options
from medusa_kit.cli.parser import command
from medusa_kit.errors import UsageError, unknown_value
from medusa_kit.settings.sampling import NO_FIELDS, SamplingParams

app = command.app(help="Make training data from prompts, and look at it.")

Argument = Annotated[str | None, typer.Argument(metavar="PROMPTS", help="The same as --prompts.")]
OnError = Annotated[
    str, typer.Option(help="For a row that cannot be used: skip (and count) or fail.")
]
FOR_A_SERVER = ("endpoint_model", "return_token_ids", "concurrency", "api_key_env")
FOR_A_MODEL = ("batch_size", "dtype", "device", "activations")


@app.command("generate", cls=command.Command)
@options.with_sampling(without=NO_FIELDS)  # which no server takes either
def generate(
    context: typer.Context,
    output: Annotated[Path, options.output_option("File for the answers, a JSON line each.")],
    argument: Argument = None,
    prompts: Annotated[str | None, options.prompts_option()] = None,
    model: options.Model = options.DEFAULT_MODEL,
    revision: options.Revision = None,
    max_new_tokens: options.MaxNewTokens = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 16,
    sampling: options.Sampling = options.GIVEN,
    limit: options.Limit = None,
    turns: Annotated[str, typer.Option(help="User turn to answer: first or last.")] = "first",
    on_error: OnError = "skip",
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="OpenAI-compatible server to ask instead: its address up to /v1."
        ),
    ] = None,
    endpoint_model: options.EndpointModel = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable with the server's API key.")
    ] = "OPENAI_API_KEY",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to the server at once.")] = 8,
    return_token_ids: Annotated[
        bool,
        typer.Option("--return-token-ids", help="Ask the server for token ids (vLLM, SGLang)."),
    ] = False,
    dtype: options.DType = "auto",
    device: options.Device = "auto",
    activations: options.Activations = "float32",
) -> None:
    """Let the base model answer prompts: its own answers are what its heads should learn from.

    After an interruption the same command resumes where it stopped.
    """
    source = _source(argument, prompts)
    _check_on_error(on_error)
    _check_used(context, endpoint)
    from medusa_kit.distill.openai_client import Endpoint

    params = SamplingParams.of(sampling)
    how = {"sampling": params, "turns": turns, "on_error": on_error}
    try:
        if endpoint is None:
            check_name(model)
            how |= {"max_new_tokens": max_new_tokens, "batch_size": batch_size,
                    "activations": activations}  # fmt: skip
            place = {"revision": revision, "dtype": dtype, "device": device}
            report = _generate_here(source, limit, output, model, place, how)
        else:
            server = Endpoint(endpoint, endpoint_model or model, api_key_env, max_new_tokens,
                              params, return_token_ids)  # fmt: skip
            tokenizer = model, revision
            report = _fetch(source, limit, output, tokenizer, server, concurrency, how)
    except KeyboardInterrupt:
        console.warn(
            f"stopped; {_rows_in(output)} rows are saved in {output}; "
            "run the same command to resume"
        )
        raise
    _summary(report, output)


def _source(argument: str | None, prompts: str | None) -> str:
    found: str | None = options.either("PROMPTS", argument, "--prompts", prompts)
    if found is None:
        raise UsageError(
            "no prompts were given", hint="name a file or a data set: medusa-kit data generate FILE"
        )
    return found


def _check_used(context: typer.Context, endpoint: str | None) -> None:
    """Raises UsageError for options of the one way to get answers where the other is taken."""
    names = FOR_A_SERVER if endpoint is None else FOR_A_MODEL
    unused = [name for name in names if options.was_given(context, name)]
    given = ", ".join("--" + name.replace("_", "-") for name in unused)
    if given and endpoint is None:
        raise UsageError(f"without a server {given} would not be used",
                         hint="name it: --endpoint URL")  # fmt: skip
    if given:
        raise UsageError(
            f"with a server no model is loaded here, and {given} would not be used",
            hint="leave it out, or leave out --endpoint",
        )


def _generate_here(
    source: str, limit: int | None, output: Path, model: str, place: dict[str, Any],
    how: dict[str, Any],
) -> Any:  # fmt: skip
    from medusa_kit.data.readers import read_good_and_bad
    from medusa_kit.data.without_template import tell_template
    from medusa_kit.distill.answer_file import check_answer_file
    from medusa_kit.distill.generate import generate_answers
    from medusa_kit.engine.before_loading import check_bias
    from medusa_kit.infer.cpu.activations import check_before_loading
    from medusa_kit.infer.cpu.packed_base import base_for_decoding
    from medusa_kit.settings.engine import EngineConfig

    check_answer_file(output)
    check_before_loading(EngineConfig(model=model, activations=how["activations"], **place))
    check_bias(model, place["revision"], how["sampling"])
    base = base_for_decoding(model, **place)
    tell_template(base.tokenizer, base.info.name)
    return generate_answers(base, read_good_and_bad(source, limit, extras=True), output, **how)


def _fetch(
    source: str, limit: int | None, output: Path, model: tuple[str, str | None], server: Any,
    concurrency: int, how: dict[str, Any],
) -> Any:  # fmt: skip
    from medusa_kit.base.loading import load_tokenizer
    from medusa_kit.data.readers import read_good_and_bad
    from medusa_kit.distill.answer_file import check_answer_file
    from medusa_kit.distill.generate import fetch_answers

    check_answer_file(output)
    tokenizer = load_tokenizer(*model)
    settings = {"endpoint_model": server.model, "max_new_tokens": server.max_new_tokens}
    return fetch_answers(
        tokenizer, read_good_and_bad(source, limit, extras=True), output,
        lambda messages: server.answer(messages, tokenizer), settings,
        concurrency=concurrency, **how,
    )  # fmt: skip


def _rows_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _summary(report: Any, output: Path) -> None:
    from medusa_kit.loops import too_many

    console.note(
        f"{report.written} answers written to {output}, {report.already_there} were there already; "
        f"{report.tokens:,} tokens, {report.stopped} ended by themselves"
    )
    if (many := too_many(report.loops, report.written)) is not None:
        console.warn(many)
    if report.unused:
        keys = ", ".join(map(repr, sorted(report.unused)))
        console.note(f"the keys {keys} of rows are not used")
    if report.changed:
        console.warn(
            f"{report.changed} prompts changed since they were answered: they are answered anew"
        )
    for row, reason in report.skipped[:5]:
        console.warn(f"row {row} skipped: {reason}")
    if len(report.skipped) > 5:
        console.warn(f"{len(report.skipped)} rows skipped in all")


@app.command("inspect", cls=command.Command)
def inspect(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="DATA", help=f"Prompts or conversations: {options.PROMPTS}."),
    ],
    model: options.Model = options.DEFAULT_MODEL,
    row: Annotated[int, typer.Option(min=1, help="Row of the first source to print, from 1.")] = 1,
    limit: Annotated[int, typer.Option(min=1, help="Rows of each source to count.")] = 1000,
    max_length: Annotated[
        int, typer.Option(min=1, help="Cut rows at this many tokens, and show what is lost.")
    ] = 2048,
    on_error: OnError = "skip",
) -> None:
    """Show which tokens of a conversation are trained on and which are masked; of prompts, what the
    model is asked."""
    _check_on_error(on_error)
    from medusa_kit.base.loading import load_tokenizer
    from medusa_kit.cli import inspected_prompts
    from medusa_kit.data.chat import encode_rows
    from medusa_kit.data.readers import read_good_and_bad

    tokenizer = load_tokenizer(model)
    encoded: list[Any] = []
    for source in sources:
        count = limit if encoded else max(limit, row)
        rows = list(itertools.islice(read_good_and_bad(source, extras=True), count))
        if len(sources) == 1 and inspected_prompts.are_prompts(rows):
            inspected_prompts.show(tokenizer, source, rows, row, on_error)
            return
        encoded.append(encode_rows(rows, tokenizer, max_length, on_error))
    examples, report = encoded[0]
    example = next((example for example in examples if example.row == row), None)
    if example is None:
        reason = dict(report.skipped).get(row, "the source has no such row")
        raise UsageError(f"row {row} cannot be shown: {reason}")
    console.out.print(_painted(tokenizer, example), soft_wrap=True, highlight=False)
    console.out.print(_shares(example, examples, report), highlight=False)
    for source, (_, report) in zip(sources, encoded, strict=True):
        line = _cost(source, report, max_length)
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)
        for note in [f"{source}: {line}" for line in report.skips()] + report.notes():
            console.note(note)


def _shares(example: Any, examples: Any, report: Any) -> str:
    """One line: how much of this row, and of all rows of its source, is trained on."""
    shown, tokens = sum(example.loss_mask), len(example.loss_mask)
    share = report.trained_tokens / report.tokens
    return (
        f"row {example.row}: {shown} of {tokens} tokens trained on ({shown / tokens:.1%}); "
        f"{len(examples)} rows: {report.trained_tokens:,} of {report.tokens:,} "
        f"({share:.1%}), {len(report.skipped)} skipped, {report.truncated} truncated"
    )


def _cost(source: str, report: Any, max_length: int) -> str:
    """One line: what the cut at `max_length` tokens takes from a source."""
    lost = report.trained_tokens_cut
    total = report.trained_tokens + lost
    rows = sum(count.kept for count in report.sources.values()) + report.emptied
    return (
        f"{source}: at {max_length:,} tokens {report.truncated:,} of {rows:,} rows are cut "
        f"({report.emptied:,} have nothing left) and {lost:,} of {total:,} trained tokens lost "
        f"({lost / total:.1%}); the longest row has {report.longest:,}"
    )


def _painted(tokenizer: Any, example: Any) -> Any:
    """The text in two colours; without colour, trained text is between ⟦ and ⟧."""
    from rich.text import Text

    text = Text()
    text.append("masked", style="dim cyan")
    text.append(" and ")
    text.append("⟦trained⟧", style="bold green")
    text.append(" tokens:\n")
    turns = itertools.accumulate(t in example.turn_starts for t in range(len(example.loss_mask)))
    pairs = zip(zip(example.loss_mask, turns, strict=True), example.input_ids, strict=True)
    for (trained, _), run in itertools.groupby(pairs, key=lambda pair: pair[0]):
        piece = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        if trained:
            text.append(f"⟦{piece}⟧", style="bold green")
        else:
            text.append(piece, style="dim cyan")
    return text


def _check_on_error(on_error: str) -> None:
    if on_error not in ("skip", "fail"):
        raise unknown_value("on-error", on_error, ("skip", "fail"), kind=UsageError)
