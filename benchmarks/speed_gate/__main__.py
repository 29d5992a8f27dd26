"""Runs two versions in turn, case by case, and compares them. The package's docstring has more."""

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.random_gguf import PRESETS, write
from benchmarks.rounds import Verdict, in_turn, verdict
from benchmarks.speed_gate.cases import KINDS, Case, Questions, Setup, cases, setups
from benchmarks.speed_gate.versions import ROOT, Worker, checked_out
from medusa_kit import console
from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.files import atomic_write

OLD, NEW = "old", "new"
SMALL = {"layers": 2, "vocab": 16384, "context": 1024}  # of the shape 1B, for the Q4_K file
Found = dict[str, Any]  # figure -> Verdict; or why there is none, as `skipped` or `broken`


@dataclass(frozen=True)
class Gate:
    """The versions' folders, where caches and logs are, and what is asked of them."""

    folders: Mapping[str, Path]
    work: Path
    logs: Path
    rounds: int
    questions: Questions

    def run(self, setup: Setup, chosen: Sequence[Case]) -> dict[str, Found]:
        """The cases of a setup, in rounds; the workers live as long."""
        found: dict[str, Found] = {}
        with ExitStack() as ends:
            workers = {}
            for name, folder in self.folders.items():
                log, cache = self.logs / f"{name}.log", self.work / f"cache-{name}"
                worker = Worker(folder, cache, setup.environment, log)
                ends.callback(worker.close)
                workers[name] = worker
            if setup.first is not None:
                begun = {name: worker.ask(setup.first) for name, worker in workers.items()}
                if failed := _failed(begun):
                    return {case.name: failed for case in chosen}
            for case in chosen:
                why = self.questions.lacks(case)
                found[case.name] = {"skipped": why} if why else self._case(case, workers)
                console.note(
                    "; ".join(" ".join(row) for row in rows_of({case.name: found[case.name]}))
                )
        return found

    def _case(self, case: Case, workers: Mapping[str, Worker]) -> Found:
        """The first question warms up: only counts take it in, since captures are made there."""
        figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: {OLD: [], NEW: []})
        others = 0
        for number in range(1 + self.rounds * case.each):
            command, said = self.questions.of(case, number), {}
            for name in in_turn((OLD, NEW), case.name, number):
                said[name] = workers[name].ask(command)
            if failed := _failed(said):
                return failed
            others += said[OLD].get("said") != said[NEW].get("said")
            for name, one in said.items():
                for figure, value in one["figures"].items():
                    if number or KINDS[figure] == "count":
                        figures[figure][name].append(value)
        found: Found = {
            figure: verdict(of[OLD], of[NEW], KINDS[figure]) for figure, of in figures.items()
        }
        return {**found, "other answers": others} if others else found


def _failed(said: Mapping[str, Mapping[str, Any]]) -> Found | None:
    """What the old version can't do either is skipped."""
    if "error" in said[OLD]:
        return {"skipped": said[OLD]["error"]}
    return {"broken": said[NEW]["error"]} if "error" in said[NEW] else None


def rows_of(found: Mapping[str, Found]) -> list[tuple[str, ...]]:
    rows = []
    for case, figures in found.items():
        for name, one in figures.items():
            if isinstance(one, Verdict):
                between = f"{one.low:.3f} to {one.high:.3f}" if one.low else ""
                rows.append((case, name, str(one.pairs), f"{one.old:.4g}", f"{one.new:.4g}",
                             f"{one.ratio:.3f}", between, one.state))  # fmt: skip
            elif name == "other answers":
                rows.append((case, name, "", "", str(one), "", "", "answers differ"))
            else:
                rows.append((case, "", "", "", "", "", "", f"{name}: {one}"))
    return rows


def failures(found: Mapping[str, Found]) -> list[str]:
    return [
        case
        for case, figures in found.items()
        if "broken" in figures
        or any(getattr(one, "state", "") == "slower" for one in figures.values())
    ]


def save(found: Mapping[str, Found], path: Path, about: Mapping[str, Any]) -> None:
    def plain(one: Any) -> Any:
        return asdict(one) if isinstance(one, Verdict) else one

    cases = {case: {n: plain(one) for n, one in of.items()} for case, of in found.items()}
    with atomic_write(path) as to:
        to.write_text(json.dumps({**about, "cases": cases}, indent=1) + "\n", encoding="utf-8")


def chosen_of(names: str | None, known: Sequence[Case]) -> list[Case]:
    """Those whose name has one of the words. Raises ConfigError."""
    words = names.split(",") if names else [""]
    if unknown := [word for word in words if not any(word in case.name for case in known)]:
        hint = f"cases: {', '.join(case.name for case in known)}"
        raise ConfigError(f"CASES has {unknown[0]!r}, which is in no case's name", hint=hint)
    return [case for case in known if any(word in case.name for word in words)]


def gate(asked: argparse.Namespace) -> int:
    with ExitStack() as ends:
        work = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="speed-gate-")))
        known = cases(asked.tokens, work)
        chosen = chosen_of(asked.cases, known)
        folders = {OLD: ends.enter_context(checked_out(asked.old)), NEW: asked.new.resolve()}
        questions = Questions(asked.prompts, asked.tasks)
        questions.write(work)
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        run, found = Gate(folders, work, asked.output.parent, asked.rounds, questions), {}
        for name, setup in setups(work / "q4_k.gguf", asked.isa).items():
            own = [case for case in chosen if case.setup == name]
            if own:
                if name == "Q4_K":
                    write(work / "q4_k.gguf", replace(PRESETS["1B"], **SMALL), name, 0)
                console.note(f"{name}: {', '.join(case.name for case in own)}")
                found |= run.run(setup, own)
                about = {"old": asked.old, "rounds": asked.rounds, "tokens": asked.tokens}
                save(found, asked.output, about)
    columns = ("case", "figure", "pairs", "old", "new", "new/old", "95%", "")
    console.out.print(console.table("above 1: the new version is better", columns, rows_of(found)))
    if slower := failures(found):
        console.err.print(f"error: {', '.join(slower)}: slower, or broken", highlight=False)
    return 1 if slower else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed_gate", description=__doc__)
    parser.add_argument("old", help="a commit, or a folder that has medusa_kit")
    parser.add_argument("--new", type=Path, default=ROOT, help="a folder (default: this one)")
    parser.add_argument("--cases", help="parts of cases' names, with commas")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    own = ROOT / "medusa_kit" / "assets" / "verify_prompts.jsonl"
    parser.add_argument("--prompts", type=Path, default=own, help="rows with `turns`")
    parser.add_argument("--tasks", type=Path, help="rows with `turns` and `category`")
    parser.add_argument("--isa", default="avx2", help="the other instruction set")
    parser.add_argument("--output", type=Path, default=Path("build/speed_gate.json"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return gate(parser.parse_args(arguments))
    except MedusaKitError as error:
        console.err.print(f"error: {error}", markup=False, highlight=False)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
