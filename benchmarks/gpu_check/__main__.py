"""`make gpu-check`: checks of the GPU path on a machine without a GPU.

    python -m benchmarks.gpu_check                  all parts
    python -m benchmarks.gpu_check kernels --quick  a few seconds of one part

Prints a table for each part on stdout, or with --json all as data; exits with 1 if a limit is
missed.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.gpu_check.report import Report
from medusa_kit import console
from medusa_kit.errors import MedusaKitError

# Each module has `check(quick) -> Report`; a new part is a line here.
PARTS = {
    "kernels": "benchmarks.gpu_check.kernels",
    "fused": "benchmarks.gpu_check.fused",
    "step": "benchmarks.gpu_check.step",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"some of: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a few configurations of each part")
    parser.add_argument("--json", action="store_true", help="data on stdout, no tables")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    os.environ["TRITON_INTERPRET"] = (
        "0"  # read when triton is imported, here and in child processes
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ.setdefault("TRITON_CACHE_DIR", folder)  # not the one in the home folder
            reports = {name: _report(name, options.quick) for name in options.parts or PARTS}
    except MedusaKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    _show(reports, options.json)
    missed = [miss for report in reports.values() for miss in report.misses]
    for miss in missed:
        print(f"missed: {miss}", file=sys.stderr)
    return 1 if missed else 0


def _report(name: str, quick: bool) -> Report:
    report: Report = importlib.import_module(PARTS[name]).check(quick)
    return report


def _show(reports: dict[str, Report], as_json: bool) -> None:
    if as_json:
        data = {
            name: {"rows": list(report.data), "misses": list(report.misses)}
            for name, report in reports.items()
        }
        print(json.dumps(data, indent=1))
        return
    for report in reports.values():
        console.out.print(console.table(report.title, report.columns, report.rows))


if __name__ == "__main__":
    sys.exit(main())
