"""Measures the cases, of one version or of two in turn. The package's docstring has more."""

import argparse
import statistics
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from benchmarks.rounds import in_turn, verdict
from benchmarks.speed_gate.versions import ROOT, Worker, checked_out
from medusa_kit import console
from medusa_kit.store.records import cache_folder

NEW, OLD = "new", "old"
WORKER = Path(__file__).with_name("worker.py")
RUNNERS, DRAFTERS = "device,cpu", "plain,heads,drawn,stops,chosen,auto"
Case = tuple[str, str, int]  # runner, drafter, rows
Figures = dict[str, list[float]]


def measured(
    folders: dict[str, Path], cases: list[Case], rounds: int, asked: dict[str, object]
) -> dict[Case, dict[str, Figures]]:
    """Seconds by case, version and part. The first round warms up."""
    found: dict[Case, dict[str, Figures]] = {}
    with ExitStack() as ends:
        work = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="host-time-")))
        workers = {}
        for name, folder in folders.items():
            threads = {"OMP_NUM_THREADS": "1"}
            workers[name] = Worker(folder, cache_folder(), threads, work / f"{name}.log", WORKER)
            ends.callback(workers[name].close)
        for number in range(1 + rounds):
            for case in cases:
                runner, drafter, rows = case
                for name in in_turn(list(workers), *case, number):
                    command = {"runner": runner, "drafter": drafter, "rows": rows, **asked}
                    told = workers[name].ask(command)
                    if "error" in told:
                        raise SystemExit(
                            f"{name}: {told['error']}; {(work / f'{name}.log').read_text()}"
                        )
                    if not number:
                        continue
                    of_case = found.setdefault(case, {}).setdefault(name, defaultdict(list))
                    for part, seconds in told.items():
                        of_case[part].append(seconds)
    return found


def micro(seconds: list[float]) -> str:
    return f"{1e6 * statistics.median(seconds):.0f}"


def slope(of_rows: dict[int, list[float]]) -> str:
    """Microseconds that one more row adds, between the fewest and the most."""
    few, many = min(of_rows), max(of_rows)
    if few == many:
        return "–"
    more = statistics.median(of_rows[many]) - statistics.median(of_rows[few])
    return f"{1e6 * more / (many - few):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", help="a commit, or a folder that has medusa_kit")
    parser.add_argument("--runners", default=RUNNERS)
    parser.add_argument("--drafters", default=DRAFTERS)
    parser.add_argument("--rows", default="1,8,48")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sleep", type=float, default=0.0, help="microseconds, in each step")
    parser.add_argument("--parts", action="store_true")
    given = parser.parse_args()
    rows = [int(count) for count in given.rows.split(",")]
    cases = [(runner, drafter, count) for runner in given.runners.split(",")
             for drafter in given.drafters.split(",") for count in rows]  # fmt: skip
    asked = {"steps": given.steps, "parts": given.parts, "sleep": given.sleep / 1e6}
    with ExitStack() as ends:
        folders = {NEW: ROOT}
        if given.against:
            folders[OLD] = ends.enter_context(checked_out(given.against))
        found = measured(folders, cases, given.rounds, asked)
    parts = sorted({part for of in found.values() for part in of[NEW]} - {"clock", "computing"})
    columns = ["runner", "drafts", "rows", "µs", "of its thread", "a row", *parts]
    columns += ["old", "a row, old", "ratio"] if given.against else []
    table = []
    for runner, drafter, count in cases:
        of_case = found[runner, drafter, count]
        new = of_case[NEW]
        by_rows = {name: {one: found[runner, drafter, one][name]["clock"] for one in rows}
                   for name in of_case}  # fmt: skip
        line = [runner, drafter, count, micro(new["clock"]), micro(new["computing"]),
                slope(by_rows[NEW]), *(micro(new.get(part, [0.0])) for part in parts)]  # fmt: skip
        if given.against:
            old = of_case[OLD]["clock"]
            told = verdict(old, new["clock"], "cost")
            interval = "" if told.low is None else f" ({told.low:.2f} to {told.high:.2f})"
            line += [micro(old), slope(by_rows[OLD]), f"{told.ratio:.2f}{interval}"]
        table.append(line)
    title = f"Microseconds of a step whose forward takes none, {given.rounds} rounds"
    console.out.print(console.table(title, columns, table))


if __name__ == "__main__":
    main()
