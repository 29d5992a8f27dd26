"""Reports of `bench` and `verify` as files: what was measured, with what, and on which machine.

torch is not imported here, since a bench of a server alone does without.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_kit import console
from medusa_kit.bench.bench import BenchReport
from medusa_kit.files import atomic_write
from medusa_kit.settings.engine import FLOAT32

if TYPE_CHECKING:
    from medusa_kit.bench.verify import VerifyReport
    from medusa_kit.engine.engine import Engine


def engine_record(engine: "Engine", setup: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured, for bench.json."""
    return {
        "base": engine.base.info.as_dict(),
        "weights": engine.weights,
        "activations": engine.activations,
        "cache": engine.cache,
        "lossy": bool(engine.lossy_by),
        "drafter": engine.own_drafter,
        "heads_refused": engine.heads_refused,
        "attention": engine.attention.report(),
        "setup": setup,
    }


def write_bench(
    report: BenchReport,
    breakdowns: Mapping[str, Any],
    record: Mapping[str, Any],
    name: str,
    folder: Path,
) -> None:
    """bench.json, and bench.png where matplotlib is there.

    `record`: what was measured with; `name`: of the model, for the chart.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        **record,
        **report.as_dict(),
        "breakdown": {name: one.as_dict() for name, one in breakdowns.items()},
    }
    with atomic_write(folder / "bench.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n")
    console.note(f"wrote {folder / 'bench.json'}")
    try:
        from medusa_kit.tuning.plots import plot_bench
    except ImportError:
        console.note("no chart: matplotlib is not installed (pip install 'medusa-kit[plot]')")
        return
    rates = {result.name: result.total.tokens_per_second for result in report.ran}
    depths = {result.name: result.total.acceptance_by_depth for result in report.ran}
    plot_bench(rates, depths, f"{name}, batch {report.batch_size}", folder / "bench.png")
    console.note(f"wrote {folder / 'bench.png'}")


def write_verify(
    reports: Mapping[str, "VerifyReport"], engine: "Engine", prompts: str, path: Path
) -> None:
    """The reports by name, the greedy one first; `prompts`: what they are called."""
    from medusa_kit.bench.machine import describe_setup, heads_digest
    from medusa_kit.bench.verify import LAYER_BY_LAYER

    if engine.activations != FLOAT32:
        held_to = reports["greedy"].reference
    else:
        in_pieces = reports["greedy"].reference == LAYER_BY_LAYER
        layers = ", layer by layer" if in_pieces else ""
        held_to = f"plain transformers with {engine.weights} weights{layers}"
    origin = {
        "prompts": prompts,
        "base": engine.base.info.as_dict(),
        "activations": engine.activations,
        "lossy": engine.base.info.lossy,
        "held_to": held_to,
        "heads": heads_digest(engine),
        "setup": describe_setup(engine),
    }
    with atomic_write(path) as temporary:
        record = {name: report.as_dict() | origin for name, report in reports.items()}
        temporary.write_text(json.dumps(record, indent=2) + "\n")
