"""Tables and charts of a run of llama_cpp.py, from its record."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llama_cases import ANSWERS, GUESSING
from side_by_side import (
    COLOURS,
    COLUMNS,
    OURS,
    THEIRS,
    Measured,
    chart,
    rows,
    save,
    set_up_fonts,
)

from medusa_kit import console
from medusa_kit.bench.report import NO_DRAFTER, ONE_NODE, BenchReport, MethodResult
from medusa_kit.files import write_text

IMAGES = Path("docs/images")
# What the chart says of methods, and whose they are, by kind and drafter.
BARS = {
    ("transformers", None): ("transformers generate", "transformers"),
    ("peer", None): ("transformers prompt lookup", "transformers"),
    ("endpoint", None): ("llama.cpp, the same GGUF file", THEIRS),
    ("ours", NO_DRAFTER): (ONE_NODE, OURS),
    ("ours", "medusa"): ("medusa-kit, heads", OURS),
    ("ours", "auto"): ("medusa-kit, auto (the default)", OURS),
}


def method_rows(report: BenchReport) -> list[list[str]]:
    """Of whole answers: tokens a second, also without the reading of prompts, and ratios of both to
    the first method and to the same program's plain decoding."""
    cells = []
    for one in report.results:
        if one.not_run is not None:
            cells.append([one.name, f"not run: {one.not_run}", *["–"] * 6])
            continue
        plain, total = _plain_of(one, report), one.total
        cells.append([
            one.name, f"{total.tokens_per_second:.1f}",
            console.number(total.ratio(report.results[0].total), ".2f"),
            console.number(total.decoding_tokens_per_second, ".1f"),
            console.number(total.ratio(plain.total), ".2f"),
            console.number(total.decoding_ratio(plain.total), ".2f"),
            console.number(total.acceptance_length, ".3f"),
            "–" if total.identical is None else f"{total.identical}/{total.answers}",
        ])  # fmt: skip
    return cells


def _plain_of(result: MethodResult, report: BenchReport) -> MethodResult:
    """The method that decodes plainly in the same program: the first of its servers; ours of one
    node; transformers generate."""
    if result.kind == "endpoint":
        return next(one for one in report.ran if one.kind == "endpoint")
    return (report.plain if result.ours else None) or report.results[0]


METHOD_COLUMNS = ("method", "tokens/s", "to the first", "decoding only", "to its plain decoding",
                  "decoding only, to its plain", "acceptance length", "identical")  # fmt: skip


def tables(record: dict[str, Any]) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """(title, columns, rows) of what a record has."""
    found = [Measured.of(one) for one in record["cases"]]
    if found:
        yield "in turn, medians of rounds; ratios within a round", COLUMNS, rows(found)
    for part in (ANSWERS, GUESSING):
        if part in record:
            report = BenchReport.from_json(record[part])
            title = f"{part}: {report.num_prompts} prompts, {report.max_new_tokens} new tokens"
            yield title, METHOD_COLUMNS, method_rows(report)


def title_of(record: dict[str, Any]) -> str:
    setup = record["setup"]
    return f"{record['model']}, {setup['processor']}, {setup['threads']} threads"


def show(record: dict[str, Any], output: Path) -> None:
    """Tables on stdout and in beside.md; charts."""
    text = f"{title_of(record)}, {record['date']}\n\n"
    for title, columns, cells in tables(record):
        console.out.print(console.table(title, columns, cells))
        text += f"{title}\n\n{console.markdown(columns, cells)}\n\n"
    write_text(output / "beside.md", text)
    draw(record, IMAGES if record["complete"] else output)


def draw(record: dict[str, Any], folder: Path) -> None:
    found = [Measured.of(one) for one in record["cases"]]
    chart(found, title_of(record), folder / "llama_cpp.svg")
    if ANSWERS in record:
        draw_answers(record, folder / "speed.svg")


def draw_answers(record: dict[str, Any], path: Path) -> None:
    """Bars of tokens a second, over whole answers: prompts are read, then tokens made."""
    from matplotlib import pyplot

    speeds = {}
    for result in BenchReport.from_json(record[ANSWERS]).ran:
        speeds[result.kind, result.drafter] = result.total.tokens_per_second
    shown = [what for what in BARS if what in speeds]
    set_up_fonts(pyplot)
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(shown) + 0.8))
    for place, what in enumerate(shown):
        axes.barh(place, speeds[what], color=COLOURS[BARS[what][1]], height=0.7)
        axes.text(speeds[what], place, f" {speeds[what]:.0f}", va="center")
    axes.set_yticks(range(len(shown)), [BARS[what][0] for what in shown])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(f"tokens/s, {title_of(record)}")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
    pyplot.close(figure)
