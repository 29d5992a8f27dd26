"""The figures of a server under load: tables, load.json and a chart."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.bench.load.arrivals import Load, Poisson
from medusa_kit.bench.load.run import LoadRun
from medusa_kit.files import write_json
from medusa_kit.outputs import check_folder, check_replaced, has_keys, is_picture
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.tuning.charts import draw

TIMES = ("first_token_seconds", "token_seconds", "piece_seconds", "answer_seconds")
LOAD, PICTURE = "load.json", "load.png"
FAILURES_SHOWN = 5
NONE = "–"


def show(run: LoadRun, sampled: str) -> None:
    """Print what was measured. `sampled`: how tokens were chosen."""
    points = [point.as_dict() for point in run.points]
    load = run.points[0].load
    arrived = f", Poisson arrivals, seed {load.seed}" if isinstance(load, Poisson) else ""
    title = (
        f"{run.endpoint.model} at {run.endpoint.url}: {len(run.questions)} prompts, "
        f"{run.endpoint.max_new_tokens} new tokens, {sampled}{arrived}"
    )
    console.out.print(figures_table(points, load.what, title))
    console.out.print(times_table(points, load.what))
    console.out.print("\n".join(notes(run, points)), markup=False, highlight=False)


def described(load: Load) -> str:
    return load_name({load.what: load.value}, load.what)


def load_name(point: Mapping[str, Any], what: str) -> str:
    return f"{point[what]:g} a second" if what == "rate" else f"{point[what]} at once"


def figures_table(points: Sequence[Mapping[str, Any]], what: str, title: str) -> Any:
    rows = [
        (
            load_name(point, what),
            f"{point['tokens_per_second']:.1f}",
            f"{point['answers_per_second']:.2f}",
            point["most_at_once"],
            point["answered"],
            point["failed"],
            console.number(point["acceptance_length"], ".3f"),
            NONE if point["same"] is None else f"{point['same']}/{point['compared']}",
        )
        for point in points
    ]
    columns = ("requests", "tokens/s", "answers/s", "most at once", "answered", "failed",
               "accept. length", "same")  # fmt: skip
    return console.table(title, columns, rows)


def times_table(points: Sequence[Mapping[str, Any]], what: str) -> Any:
    rows = [
        (load_name(point, what), *(_milliseconds(point[name]) for name in TIMES))
        for point in points
    ]
    columns = ("requests", "first token", "between tokens", "between pieces", "whole answer")
    return console.table("ms: p50 / p95 / p99", columns, rows)


def _milliseconds(known: Mapping[str, float] | None) -> str:
    if known is None:
        return NONE
    return " / ".join(f"{1e3 * seconds:.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.1f}"
                      for seconds in known.values())  # fmt: skip


def notes(run: LoadRun, points: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the tables mean, and which requests failed or differ."""
    notes = ["first token: from when the request was due; between tokens: the wait for a piece of "
            "text, shared among its tokens; between pieces: the wait itself"]  # fmt: skip
    if run.compared_by is not None:
        notes.append(f"same: answers that equal plain decoding of the base here"
                    f"{_precision(run)}, by {run.compared_by}")  # fmt: skip
    if all(point["first_token_seconds"] is None for point in points):
        notes.append("it sends answers whole: the time to the first token is not known")
    failed = [record for point in run.points for record in point.records if not record.answered]
    for record in failed[:FAILURES_SHOWN]:
        notes.append(f"prompt {record.number} failed: {record.error}")
    if len(failed) > FAILURES_SHOWN:
        notes.append(f"{len(failed)} requests failed in all")
    differing = sorted({number for point in points for number in point["differing"]})
    if differing:
        notes.append(f"another answer than plain decoding's: prompts "
                    f"{', '.join(map(str, differing))}")  # fmt: skip
    return notes


def _precision(run: LoadRun) -> str:
    """The precision of the answers that are compared with; empty for float32."""
    if run.plain is None or run.plain.activations == FLOAT32:
        return ""
    return f" with {run.plain.activations} activations"


def check_place(folder: Path) -> None:
    """Raises ConfigError, before anything is measured, where `write` would replace what is no
    report."""
    ours = has_keys("points")
    check_folder(folder, "--output")
    check_replaced(folder, {LOAD: ours, PICTURE: is_picture(LOAD, ours)}, "--output")


def write(run: LoadRun, record: Mapping[str, Any], folder: Path) -> None:
    """load.json, and load.png where matplotlib is there. `record`: what was measured with."""
    write_json(folder / LOAD, {**record, **run.as_dict()})
    console.note(f"wrote {folder / LOAD}")
    points = [point.as_dict() for point in run.points]
    name, what = run.endpoint.model, run.points[0].load.what
    draw_load({name: points}, what, f"{name} under load", folder)


def draw_load(
    servers: Mapping[str, Sequence[Mapping[str, Any]]], what: str, title: str, folder: Path
) -> None:
    draw(folder / PICTURE, lambda plots, path: plots.plot_load(servers, what, title, path))
