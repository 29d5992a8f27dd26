"""The program of `make demo`.

    python -m medusa_kit.demo [FOLDER]

Everything is written into FOLDER (`demo`). Run again after Ctrl-C it resumes: answers and training
go on, measurements are taken anew. Exits with 0 whatever the speeds, with 1 for a wrong token.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_kit import console, ctrl_c, stdout
from medusa_kit.errors import ConfigError, MedusaKitError

if TYPE_CHECKING:
    from medusa_kit.demo.comparison import Comparison, Size
    from medusa_kit.demo.own_heads import DemoFiles
    from medusa_kit.demo.work import Deadline, Work
    from medusa_kit.engine.engine import Engine

DRAFTERS = ("medusa", "auto")  # heads alone, and the default


def main(arguments: Sequence[str] | None = None, work: "Work | None" = None) -> int:
    """Run the demo and return the exit code. `work`: less of it, for tests."""
    parser = argparse.ArgumentParser(prog="make demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("demo"))
    folder = parser.parse_args(arguments).folder
    began = time.monotonic()
    try:
        from medusa_kit.demo.own_heads import DemoFiles
        from medusa_kit.demo.work import Deadline, Work

        work = work or Work()
        return _run_locked(
            work, DemoFiles(folder), Deadline(work.seconds - (time.monotonic() - began))
        )
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or ctrl_c.was_typed():
            ctrl_c.taken()
            _print("interrupted; `make demo` resumes with the answers and updates so far", "yellow")
            return ctrl_c.INTERRUPTED
        if not isinstance(error, MedusaKitError):
            raise
        _print(f"error: {error.message}", "bold red")
        if error.hint:
            again = f"remove {folder} and run `make demo` again to start over"
            _print(f"hint: {again if '--' in error.hint else error.hint}", "cyan")
        return error.exit_code


def _print(line: str, style: str) -> None:
    console.err.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _run_locked(work: "Work", files: "DemoFiles", deadline: "Deadline") -> int:
    from medusa_kit.train.run.lock import only_training_in

    _check(work, files)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(only_training_in(files.folder))
            files.record.write_text(_settings(work))
        except OSError as error:
            raise MedusaKitError(f"cannot write to {files.folder}: {error.strerror}") from error
        return _run(work, files, deadline)


def _settings(work: "Work") -> str:
    """JSON of the settings that may not change between the runs in one folder."""
    named = {name: asdict(work)[name] for name in ("model", "answers", "held_out", "updates")}
    return json.dumps({**named, "prompts": str(work.prompts.name)}, indent=2) + "\n"


def _check(work: "Work", files: "DemoFiles") -> None:
    """Raises ConfigError where the folder holds anything but this demo's files."""
    folder = files.folder
    names = [path.name for path in folder.glob("*")] if folder.is_dir() else []
    names = sorted(name for name in names if not name.startswith("."))
    same = files.record.is_file() and files.record.read_text() == _settings(work)
    if (names and not same) or (folder.exists() and not folder.is_dir()):
        raise ConfigError(
            f"{folder} holds other files than this demo's ({', '.join(names[:3])})",
            hint=f"move or remove {folder}, and run `make demo` again",
        )


def _run(work: "Work", files: "DemoFiles", deadline: "Deadline") -> int:
    from medusa_kit.bench.machine import describe_setup
    from medusa_kit.bench.oracle import Oracle
    from medusa_kit.demo import messages
    from medusa_kit.demo.comparison import fitting
    from medusa_kit.demo.threads import settle
    from medusa_kit.engine.load import load

    threads, before = settle()
    console.note(f"loading {work.model}; the first start on a machine compiles the C++ kernels")
    engine = load(work.model, heads=work.heads)
    setup = describe_setup(engine)
    messages.intro(work, setup["processor"], threads, before)
    oracle = Oracle.beside(engine.base)
    prompts = _prompts(engine, work)
    messages.part_one(work)
    size = fitting(engine, oracle, prompts, work.new_tokens, deadline.remaining("shipped"))
    messages.smaller(work, size)
    wrong = [_shipped(engine, oracle, prompts, size, work, files, deadline)]
    wrong.append(_own(engine, oracle, prompts, size, work, files, deadline))
    if any(wrong):
        _print(f"error: {sum(wrong)} answers hold a wrong token, which rounding does not explain",
               "bold red")  # fmt: skip
        _print("hint: this is a bug in medusa-kit: please report it with this output", "cyan")
        return 1
    messages.closing(files, deadline.spent)
    return 0


def _prompts(engine: "Engine", work: "Work") -> list[list[int]]:
    """Token ids of the prompts that all methods answer."""
    from medusa_kit.data.readers import Conversation, read_rows
    from medusa_kit.distill.generate import asked_messages

    rows = [row for row in read_rows(str(work.measured_prompts), limit=work.questions)
            if isinstance(row, Conversation)]  # fmt: skip
    return [engine.encode(asked_messages(row.messages, "first")) for row in rows]


def _shipped(
    engine: "Engine", oracle: Any, prompts: list[list[int]], size: "Size", work: "Work",
    files: "DemoFiles", deadline: "Deadline",
) -> int:  # fmt: skip
    """Run the first part. Returns the number of wrong answers."""
    from medusa_kit.demo import messages
    from medusa_kit.demo.comparison import compare

    comparison = compare(
        {messages.SHIPPED: engine}, oracle, prompts, size, drafters=DRAFTERS,
        enough=lambda: deadline.remaining("shipped") < 0,
    )  # fmt: skip
    _write(comparison, engine, work, files.shipped)
    messages.first_table(comparison, size)
    for drafter in DRAFTERS:
        messages.verdict(comparison, f"{messages.SHIPPED}, {drafter}")
    messages.tokens(comparison)
    return len(comparison.wrong)


def _own(
    engine: "Engine", oracle: Any, prompts: list[list[int]], size: "Size", work: "Work",
    files: "DemoFiles", deadline: "Deadline",
) -> int:  # fmt: skip
    """Run the second part. Returns the number of wrong answers."""
    from medusa_kit.bench.time_limit import time_limit
    from medusa_kit.demo import curve, messages
    from medusa_kit.demo.comparison import compare
    from medusa_kit.demo.own_heads import train_own
    from medusa_kit.demo.work import OutOfTime
    from medusa_kit.engine.load import with_heads

    messages.part_two(work)
    try:
        with time_limit(deadline.remaining("heads"), OutOfTime):
            done = train_own(engine, work, files, deadline)
    except OutOfTime:
        messages.cut_short(files)
        return 0
    plotted = bool(done.curve) and curve.plot(done.curve, files.curve)
    messages.trained(work, files, done, plotted)
    own = with_heads(engine, files.heads)
    comparison = compare(
        {messages.OWN: own, messages.SHIPPED: engine}, oracle, prompts,
        replace(size, with_transformers=False), drafters=("medusa",),
        enough=lambda: deadline.remaining("own") < 0,
    )  # fmt: skip
    _write(comparison, own, work, files.heads)
    messages.second_table(comparison, size)
    messages.verdict(comparison, f"{messages.OWN}, medusa")
    messages.tokens(comparison)
    return len(comparison.wrong)


def _write(comparison: "Comparison", engine: "Engine", work: "Work", folder: Path) -> None:
    from medusa_kit.bench.machine import bench_about
    from medusa_kit.settings.sampling import SamplingParams

    comparison.report.about = bench_about(
        {"medusa-kit": engine}, work.measured_prompts.name, SamplingParams()
    )
    comparison.report.write(engine.base.info.name, folder)


if __name__ == "__main__":
    with ctrl_c.is_not_lost(), stdout.ends_where_it_fails():
        sys.exit(main())
