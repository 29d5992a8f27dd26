"""`medusa-kit doctor`: why is it good in training and bad in serving?"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.cli import doctor_gpu, options
from medusa_kit.errors import UsageError
from medusa_kit.paths import expanded


def doctor(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    model: options.Model = options.DEFAULT_MODEL,
    heads: options.Heads = "auto",
    data: Annotated[
        str | None,
        typer.Option(help="What the heads were trained on, with answers: a file or a data set."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows of the data to check.")] = 32,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Largest difference between two shares of accepted draft tokens."
        ),
    ] = 0.1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    dtype: options.DType = "auto",
    device: options.Device = "auto",
    gpu: doctor_gpu.Gpu = False,
    dry_run: doctor_gpu.DryRun = False,
) -> None:
    """Check base, data and heads for the known causes of "good in training, bad in serving".

    Where there are no heads, or no --data, the checks that need them are skipped. Exit code 1 when
    there is a problem; warnings leave it at 0. With --gpu the GPU path is checked instead: exit
    code 1 when it does not work.
    """
    doctor_gpu.check_options(context, gpu)
    if gpu:
        doctor_gpu.run(dry_run, as_json, device)
        return
    from medusa_kit.base.loading import load_base_model
    from medusa_kit.bench.doctor import diagnose
    from medusa_kit.data.readers import read_rows

    if heads == "untrained":
        raise UsageError("untrained heads have nothing to check", hint="--heads names a folder")
    told = model if options.was_given(context, "model") else None
    model = options.either("MODEL", model_argument, "--model", told) or model
    _check_no_data(model)
    rows = None if data is None else list(read_rows(data, limit=limit, extras=True))
    if data is not None and rows:
        _check_answers(data, rows)
    base = load_base_model(model, dtype=dtype, device=device)
    findings = diagnose(base, rows, _heads(heads, base, context), tolerance)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(base.info.name, findings)
    problems = sum(finding.status == "problem" for finding in findings)
    if problems:
        number = "1 problem" if problems == 1 else f"{problems} problems"
        console.err.print(f"error: {number} found", style="bold red")
        raise typer.Exit(1)


def _check_no_data(model: str) -> None:
    """Raises UsageError for a file of data in the place of a model."""
    path = expanded(model)
    if path.is_file() and path.suffix != ".gguf":
        raise UsageError(
            f"{model} is a file, but no model: a GGUF file is named so",
            hint=f"--data {shlex.quote(model)} checks what heads were trained on",
        )


def _check_answers(data: str, rows: Sequence[Any]) -> None:
    """Raises UsageError for prompts alone, which no heads were trained on."""
    from medusa_kit.data.rows import Conversation

    talks = [row.messages for row in rows if isinstance(row, Conversation)]
    if len(talks) == len(rows) and not any(m["role"] == "assistant" for one in talks for m in one):
        name = shlex.quote(data)
        raise UsageError(
            f"{data} has prompts alone; expected what heads were trained on, with answers",
            hint=f"`medusa-kit data generate {name}` makes answers; without --data the rest is "
            "checked",
        )


def _heads(heads: str, base: Any, context: typer.Context) -> str | None:
    """Those to check; None where there are none by default, as for commands that decode."""
    from medusa_kit.engine.load import find_heads

    if not options.was_given(context, "heads") and find_heads(base, heads) is None:
        return None
    return options.heads_argument(heads)


def _print(name: str, findings: Sequence[Any]) -> None:
    rows = [(finding.name, finding.status, finding.what) for finding in findings]
    table = console.table(name, ("check", "status", "finding"), rows)
    for column in table.columns:
        column.justify = "left"
    console.out.print(table)
    for finding in findings:
        if finding.hint:
            console.note(f"{finding.name}: {finding.hint}")
