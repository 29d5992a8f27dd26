"""`medusa-kit train --quick`: heads for a model in a given time, without a recipe."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import typer

from medusa_kit import console
from medusa_kit.base.names import check_name
from medusa_kit.errors import DID_YOU_MEAN, UsageError, nearest
from medusa_kit.settings.quick import MADE_FOR, MadeFor

FAILED = {"bugs": "a difference is more than rounding",
          "encodings": "prompts are tokenized differently"}  # fmt: skip


def run_quick(
    refused: Sequence[str],
    model: str,
    prompts: str | None,
    hours: float,
    output: Path | None,
    device: str,
    fresh: bool,
    dry_run: bool = False,
    engine: str = "kit",
    answers: Path | None = None,
) -> None:
    """`refused`: what was given and does not go with it."""
    made_for = _check(refused, prompts, answers, hours, engine)
    check_name(model)
    from medusa_kit.base.files import resolve
    from medusa_kit.base.placement import pick_device
    from medusa_kit.quick import report
    from medusa_kit.quick.plan import minutes
    from medusa_kit.quick.run import prepared, run
    from medusa_kit.quick.session import Request
    from medusa_kit.train.processes import distributed

    if distributed.world() > 1:
        raise UsageError(
            f"--quick runs in one process; here are {distributed.world()}",
            hint="train by a recipe for several",
        )
    pick_device(device)
    source = prompts if answers is None else str(answers)
    assert source is not None
    folder, answered, earlier = folder_for(model, made_for), answers is not None, None
    if answered:
        heads = folder / "run" / "heads"
        earlier = heads if (heads / "config.json").is_file() else None
        folder = folder.with_name(f"{folder.name}-served")
    folder = output or folder
    request = Request(model, source, hours, folder, device, made_for, answered, earlier)
    session = prepared(request, fresh)
    resolve(model, weights=False)  # is it there?
    if dry_run:
        from medusa_kit.quick.forecast import already_there, forecast

        if not fresh and (found := already_there(session)) is not None:
            console.note(found)
        console.out.print(forecast(session), markup=False, highlight=False, soft_wrap=True)
        return
    try:
        verified = run(session, fresh)
    except KeyboardInterrupt:
        spent, whole = minutes(session.state.seconds()), minutes(session.total)
        console.warn(f"stopped after {spent} of {whole}; run the same command to resume")
        raise
    title, rows, commands = report.write(session)
    console.out.print(console.table(title, ("what", "result"), rows))
    console.out.print("What to type next:")
    width = max(len(command) for command, _ in commands)
    for command, what in commands:
        line = f"  {command:<{width}}  {what}"
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)
    console.note(f"the same is in {folder / 'report.json'} and {folder / 'report.md'}")
    for figure, what in FAILED.items():
        if verified.get(figure):
            console.err.print(f"error: {what}", style="bold red")
            raise typer.Exit(1)


def _check(
    refused: Sequence[str], prompts: str | None, answers: Path | None, hours: float, engine: str
) -> MadeFor:
    if refused:
        raise UsageError(
            f"--quick does not go with {' and '.join(refused)}",
            hint="it chooses the recipe itself, and writes it to the folder; -m names the model",
        )
    if prompts is None and answers is None:
        raise UsageError(
            "--quick needs prompts to answer",
            hint="name a file with --prompts, or one of answers with --from",
        )
    if prompts is not None and answers is not None:
        raise UsageError(
            "--prompts does not go with --from, which has prompts and answers",
            hint="leave one of them out",
        )
    if not (math.isfinite(hours) and hours > 0):
        raise UsageError(f"--hours {hours:g} is out of range; expected a number above 0")
    for known in MADE_FOR:
        if engine == known:
            return known
    close = nearest(
        engine, MADE_FOR, cutoff=0.75
    )  # the names of other engines are no typing errors
    raise UsageError(
        f"--for {engine!r} is unknown; expected one of {', '.join(MADE_FOR)}",
        hint=DID_YOU_MEAN.format(close) if close
        else "heads for any other engine of docs/formats.md: --for tgi",
    )  # fmt: skip


def folder_for(model: str, engine: MadeFor) -> Path:
    """Where everything goes unless --output says so; one folder for each engine."""
    return Path(f"heads-{name_of(model)}" + ("" if engine == "kit" else f"-{engine}"))


def name_of(model: str) -> str:
    """A model's name for a folder: its last part, in letters that every system takes."""
    last = Path(model.rstrip("/")).name.removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.").lower() or "model"
