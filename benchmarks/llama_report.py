"""Tables and charts of a run of llama_cpp.py, from its record."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llama_cases import ANSWERS, GUESSING
from llama_tools import NAME
from side_by_side import (
    COLOURS,
    COLUMNS,
    OURS,
    THEIRS,
    Measured,
    chart,
    markdown,
    rows,
    save,
    set_up_fonts,
)

from medusa_kit import console
from medusa_kit.bench.report import FORMER, ONE_NODE
from medusa_kit.files import atomic_write

IMAGES = Path("docs/images")
# How the bench names methods (or how those names end): what the chart says, and whose.
BARS = {
    "transformers generate": ("transformers generate", "transformers"),
    "transformers prompt lookup": ("transformers prompt lookup", "transformers"),
    f"endpoint, {NAME}": ("llama.cpp, the same GGUF file", THEIRS),
    ONE_NODE: (ONE_NODE, OURS),
    ", medusa": ("medusa-kit, heads", OURS),
    ", auto": ("medusa-kit, auto (the default)", OURS),
}


def method_rows(report: dict[str, Any]) -> list[list[str]]:
    """Of whole answers: tokens a second, also without the reading of prompts, and ratios of both to
    the first method and to the same program's plain decoding."""
    ran = {_name(one): one for one in report["methods"] if "not_run" not in one}
    cells = []
    for name, one in ran.items():
        plain = ran.get(plain_of(name), {})
        cells.append([
            name, f"{one['tokens_per_second']:.1f}", f"{one['ratio']:.2f}",
            _number(one["decoding_tokens_per_second"], 1),
            _over(one, plain, "tokens_per_second"), _over(one, plain, "decoding_tokens_per_second"),
            _number(one["acceptance_length"], 3),
            "–" if one["identical"] is None else f"{one['identical']}/{one['answers']}",
        ])  # fmt: skip
    missing = ([one["name"], f"not run: {one['not_run']}", *["–"] * 6]
               for one in report["methods"] if "not_run" in one)  # fmt: skip
    return [*cells, *missing]


METHOD_COLUMNS = ("method", "tokens/s", "to the first", "decoding only", "to its plain decoding",
                  "decoding only, to its plain", "acceptance length", "identical")  # fmt: skip


def _name(method: dict[str, Any]) -> str:
    """As the bench names it now; the record may be an earlier release's."""
    name: str = method["name"]
    return FORMER.get(name, name)


def plain_of(name: str) -> str:
    """The method that decodes plainly in the same program."""
    for start, plain in (("endpoint", f"endpoint, {NAME}"), ("medusa-kit", ONE_NODE)):
        if name.startswith(start):
            return plain
    return "transformers generate"


def _over(one: dict[str, Any], plain: dict[str, Any], figure: str) -> str:
    mine, other = one.get(figure), plain.get(figure)
    return _number(mine / other if mine and other else None, 2)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def tables(record: dict[str, Any]) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """(title, columns, rows) of what a record has."""
    found = [Measured.of(one) for one in record["cases"]]
    if found:
        yield "in turn, medians of rounds; ratios within a round", COLUMNS, rows(found)
    for part in (ANSWERS, GUESSING):
        if part in record:
            report = record[part]
            title = (
                f"{part}: {report['num_prompts']} prompts, {report['max_new_tokens']} new tokens"
            )
            yield title, METHOD_COLUMNS, method_rows(report)


def title_of(record: dict[str, Any]) -> str:
    setup = record["setup"]
    return f"{record['model']}, {setup['processor']}, {setup['threads']} threads"


def show(record: dict[str, Any], output: Path) -> None:
    """Tables on stdout and in beside.md; charts."""
    text = f"{title_of(record)}, {record['date']}\n\n"
    for title, columns, cells in tables(record):
        console.out.print(console.table(title, columns, cells))
        text += f"{title}\n\n{markdown(columns, cells)}\n"
    with atomic_write(output / "beside.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
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
    for method in record[ANSWERS]["methods"]:
        end = next((end for end in BARS if _name(method).endswith(end)), None)
        if end is not None and "not_run" not in method:
            speeds[end] = method["tokens_per_second"]
    shown = [end for end in BARS if end in speeds]
    set_up_fonts(pyplot)
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(shown) + 0.8))
    for place, end in enumerate(shown):
        axes.barh(place, speeds[end], color=COLOURS[BARS[end][1]], height=0.7)
        axes.text(speeds[end], place, f" {speeds[end]:.0f}", va="center")
    axes.set_yticks(range(len(shown)), [BARS[end][0] for end in shown])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(f"tokens/s, {title_of(record)}")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
    pyplot.close(figure)
