"""A report as tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.gpu.report import NO_MEASUREMENT, Record, Report
from medusa_kit import console

Column = tuple[str, str, int | None]  # heading, figure, digits after the point or None for text
NONE = "–"

STEPS: Sequence[Column] = (
    ("ms", "ms", 3),
    ("× floor", "times_floor", 2),
    ("on\ndevice", "device_times_floor", 2),
    ("syncs", "host_syncs", 1),
    ("attention", "attention", None),
)
TABLES: dict[str, tuple[str, Sequence[Column]]] = {
    "bandwidth": ("Memory, GB/s", (
        ("most", "gb_per_second", 0), ("copy", "copy_gb_per_second", 0),
        ("sum", "sum_gb_per_second", 0), ("maximum", "maximum_gb_per_second", 0),
        ("matrix\n× vector", "matrix_times_vector_gb_per_second", 0))),
    "exactness": ("Greedy tokens against transformers", (
        ("answers", "answers", 0), ("identical", "identical", 0),
        ("not by\nrounding", "beyond_rounding", 0), ("tokens\na step", "acceptance_length", 2))),
    "steps": ("Steps", STEPS),
    "answers": ("Answers", (
        ("tokens/s", "tokens_per_second", 1), ("tokens\na step", "acceptance_length", 2),
        ("× trans-\nformers", "against_transformers", 2), ("first\ns", "first_seconds", 2))),
    "prompts": ("Prompts", (
        ("ms", "ms", 2), ("× floor", "times_floor", 2), ("tokens/s", "tokens_per_second", 0),
        ("attention", "attention", None))),
    "tests": ("Tests", (("tests", "tests", 0), ("passed", "passed", 0),
                        ("skipped", "skipped", 0))),
    "products": ("Matrix products of a whole step", (
        ("ms", "as_is_ms", 3), ("× floor", "as_is_times_floor", 2), ("fused\nms", "fused_ms", 3),
        ("× floor", "fused_times_floor", 2))),
    "attention": ("Tree attention alone, 64 nodes", (
        ("µs", "us", 1), ("GB/s", "gb_per_second", 0))),
    "captures": ("Captures", (
        ("forwards", "forwards", 0), ("s", "seconds", 2), ("ms each", "ms_each", 1),
        ("graphs\nGB", "graphs_gb", 3), ("cache\nGB", "cache_gb", 2))),
    "load": ("A batch under load", (
        ("tokens/s", "tokens_per_second", 1), ("first,\nms", "first_token_ms", 1),
        ("step,\nms", "step_ms", 2), ("most,\nms", "step_most_ms", 1),
        ("loose", "loose_forwards", 0))),
    "drafts": ("Drafts of 4 random heads", (
        ("captured\nms", "ms", 3), ("loop\nms", "loop_ms", 3), ("step with\nit, ms", "step_ms", 3),
        ("× floor", "step_times_floor", 2))),
    "kernels": ("What steps launch", (("operations\na step", "kernels", 0), ("ms", "ms", 3))),
    "training": ("Training", (
        ("positions/s", "positions_per_second", 0),
        ("hidden states,\ntokens/s", "feature_tokens_per_second", 0))),
}  # fmt: skip
MET = {True: "met", False: "missed", None: NONE}


def print_report(report: Report) -> None:
    setup = report.setup
    versions = ", ".join(f"{name} {setup[name]}" for name in ("torch", "transformers", "triton"))
    title = NO_MEASUREMENT if report.dry_run else f"{setup['device']}, {versions}"
    console.out.print(title, markup=False, highlight=False, style="bold")
    for table in _tables(report):
        console.out.print(table)
    _print_without(report)
    if report.goals:
        console.out.print(_goals(report))


def _tables(report: Report) -> Iterator[Table]:
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in report.records.values():
        if record.status == "done":
            groups.setdefault((record.kind, record.shape), []).append(record)
    for kind, (title, columns) in TABLES.items():
        for (of_kind, shape), records in groups.items():
            if of_kind == kind:
                heading = f"{title}, {shape}" if shape else title
                heading += " (no measurement)" if report.dry_run else ""
                yield _table(heading, columns, records)


def _print_without(report: Report) -> None:
    """Printed as lines, since reasons are too long for a table."""
    without = [one for one in report.records.values() if one.status != "done"]
    if without:
        console.out.print("Without figures", style="bold")
    for one in without:
        line = f"{one.name}: {one.status}, {one.why or NONE}"
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)


def _goals(report: Report) -> Table:
    rows = [(goal["goal"], _shown(goal["figure"], 2), MET[goal["met"]]) for goal in report.goals]
    none = " (nothing was measured)" if report.dry_run else ""
    return console.table(f"Goals{none}", ("goal", "figure", "met"), rows)


def _table(title: str, columns: Sequence[Column], records: Sequence[Record]) -> Table:
    headings = ("part", *(heading for heading, _, _ in columns), "peak\nGB")
    rows = [
        (_label(one), *(_cell(one.figures, column) for column in columns), _shown(one.peak_gb, 2))
        for one in records
    ]
    return console.table(title, headings, rows)


def _label(record: Record) -> str:
    return record.name.removeprefix(f"{record.shape}: ")


def _cell(figures: Mapping[str, Any], column: Column) -> str:
    _, name, digits = column
    return _shown(figures.get(name), digits)


def _shown(value: Any, digits: int | None) -> str:
    if value is None:
        return NONE
    return str(value) if digits is None else f"{value:,.{digits}f}"
