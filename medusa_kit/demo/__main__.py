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

from medusa_kit import console
from medusa_kit.errors import ConfigError, MedusaKitError

if TYPE_CHECKING:
    from medusa_kit.demo.comparison import Comparison, Size
    from medusa_kit.demo.own import Places
    from medusa_kit.demo.work import Deadline, Work
    from medusa_kit.engine.engine import Engine

INTERRUPTED = 130
DRAFTERS = ("medusa", "auto")  # heads alone, and the default


def main(arguments: Sequence[str] | None = None, work: "Work | None" = None) -> int:
    """`work`: less of it, for tests. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("demo"))
    folder = parser.parse_args(arguments).folder
    began = time.monotonic()
    try:
        from medusa_kit.demo.own import Places
        from medusa_kit.demo.work import Deadline, Work

        work = work or Work()
        return _held(work, Places(folder), Deadline(work.seconds - (time.monotonic() - began)))
    except MedusaKitError as error:
        _print(f"error: {error.message}", "bold red")
        if error.hint:
            again = f"remove {folder} and run `make demo` again to start over"
            _print(f"hint: {again if '--' in error.hint else error.hint}", "cyan")
        return error.exit_code
    except KeyboardInterrupt:
        _print("interrupted; `make demo` resumes with the answers and updates so far", "yellow")
        return INTERRUPTED


def _print(line: str, style: str) -> None:
    console.err.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _held(work: "Work", places: "Places", deadline: "Deadline") -> int:
    from medusa_kit.train.run.lock import only_training_in

    _check(work, places)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(only_training_in(places.folder))
            places.record.write_text(_settings(work))
        except OSError as error:
            raise MedusaKitError(f"cannot write to {places.folder}: {error.strerror}") from error
        return _run(work, places, deadline)


def _settings(work: "Work") -> str:
    """What may not change between the runs in one folder."""
    named = {name: asdict(work)[name] for name in ("model", "answers", "held_out", "updates")}
    return json.dumps({**named, "prompts": str(work.prompts.name)}, indent=2) + "\n"


def _check(work: "Work", places: "Places") -> None:
    """Raises ConfigError where the folder holds anything but this demo's files."""
    folder = places.folder
    there = [path.name for path in folder.glob("*")] if folder.is_dir() else []
    there = sorted(name for name in there if not name.startswith("."))
    same = places.record.is_file() and places.record.read_text() == _settings(work)
    if (there and not same) or (folder.exists() and not folder.is_dir()):
        raise ConfigError(
            f"{folder} holds other files than this demo's ({', '.join(there[:3])})",
            hint=f"move or remove {folder}, and run `make demo` again",
        )


def _run(work: "Work", places: "Places", deadline: "Deadline") -> int:
    from medusa_kit.bench.machine import describe_setup
    from medusa_kit.bench.oracle import Oracle
    from medusa_kit.demo import shown
    from medusa_kit.demo.comparison import fitting
    from medusa_kit.demo.threads import settle
    from medusa_kit.engine.load import load

    threads, before = settle()
    console.note(f"loading {work.model}; the first start on a machine compiles the C++ kernels")
    engine = load(work.model, heads=work.heads)
    setup = describe_setup(engine)
    shown.intro(work, setup["processor"], threads, before)
    oracle = Oracle.beside(engine.base)
    prompts = _prompts(engine, work)
    shown.part_one(work)
    size = fitting(engine, oracle, prompts, work.new_tokens, deadline.left("shipped"))
    shown.smaller(work, size)
    wrong = [_shipped(engine, oracle, prompts, size, work, places, deadline)]
    wrong.append(_own(engine, oracle, prompts, size, work, places, deadline))
    if any(wrong):
        _print(f"error: {sum(wrong)} answers hold a wrong token, which rounding does not explain",
               "bold red")  # fmt: skip
        _print("hint: this is a bug in medusa-kit: please report it with this output", "cyan")
        return 1
    shown.closing(places, deadline.spent)
    return 0


def _prompts(engine: "Engine", work: "Work") -> list[list[int]]:
    """Token ids of the prompts that all methods answer."""
    from medusa_kit.data.readers import Conversation, read_rows
    from medusa_kit.distill.generate import asked_messages

    rows = [row for row in read_rows(str(work.asked), limit=work.questions)
            if isinstance(row, Conversation)]  # fmt: skip
    return [engine.encode(asked_messages(row.messages, "first")) for row in rows]


def _shipped(
    engine: "Engine", oracle: Any, prompts: list[list[int]], size: "Size", work: "Work",
    places: "Places", deadline: "Deadline",
) -> int:  # fmt: skip
    """The first part. Returns the number of wrong answers."""
    from medusa_kit.demo import shown
    from medusa_kit.demo.comparison import compare

    found = compare(
        {shown.SHIPPED: engine}, oracle, prompts, size, drafters=DRAFTERS,
        enough=lambda: deadline.left("shipped") < 0,
    )  # fmt: skip
    _write(found, engine, work, places.shipped)
    shown.first_table(found, size)
    for drafter in DRAFTERS:
        shown.verdict(found, f"{shown.SHIPPED}, {drafter}")
    shown.tokens(found)
    return len(found.wrong)


def _own(
    engine: "Engine", oracle: Any, prompts: list[list[int]], size: "Size", work: "Work",
    places: "Places", deadline: "Deadline",
) -> int:  # fmt: skip
    """The second part. Returns the number of wrong answers."""
    from medusa_kit.bench.time_limit import time_limit
    from medusa_kit.demo import curve, shown
    from medusa_kit.demo.comparison import compare
    from medusa_kit.demo.own import train_own
    from medusa_kit.demo.work import OutOfTime
    from medusa_kit.engine.load import with_heads

    shown.part_two(work)
    try:
        with time_limit(deadline.left("heads"), OutOfTime):
            done = train_own(engine, work, places, deadline)
    except OutOfTime:
        shown.cut_short(places)
        return 0
    plotted = bool(done.curve) and curve.plot(done.curve, places.curve)
    shown.trained(work, places, done, plotted)
    own = with_heads(engine, places.heads)
    found = compare(
        {shown.OWN: own, shown.SHIPPED: engine}, oracle, prompts,
        replace(size, with_transformers=False), drafters=("medusa",),
        enough=lambda: deadline.left("own") < 0,
    )  # fmt: skip
    _write(found, own, work, places.heads)
    shown.second_table(found, size)
    shown.verdict(found, f"{shown.OWN}, medusa")
    shown.tokens(found)
    return len(found.wrong)


def _write(found: "Comparison", engine: "Engine", work: "Work", folder: Path) -> None:
    from medusa_kit.bench.machine import bench_about
    from medusa_kit.settings.sampling import SamplingParams

    found.report.about = bench_about({"medusa-kit": engine}, work.asked.name, SamplingParams())
    found.report.write(engine.base.info.name, folder)


if __name__ == "__main__":
    sys.exit(main())
