"""Trains the heads of a recipe on more and more text, and draws acceptance length against text.

    python benchmarks/heads_by_text.py recipes/smollm2_135m_heads.yaml --rows 500 1500 4500 \
        --held-out held_out.jsonl --test test.jsonl --output build/heads-by-text

Each size is a run of `medusa-kit train` on the first so many rows of the recipe's sources; what
follows `--` is passed on (section.key=value). Hidden states are shared where the recipe keeps them
on disk. Static trees are searched on --held-out and replayed on --test, answers of `data generate`
to prompts that nothing was trained on. A finished size is not run again; one that was interrupted
goes on. Writes curve.json, curve.md and curve.svg.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from side_by_side import save, set_up_fonts

from medusa_kit import console
from medusa_kit.base.placement import DTYPES
from medusa_kit.files import write_json, write_text
from medusa_kit.heads import load_heads
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.quick.answers import read_answers
from medusa_kit.settings.recipe import TrainRecipe, load_recipe
from medusa_kit.tree.replay import replay
from medusa_kit.tree.search import best_trees
from medusa_kit.tuning.calibrate import calibrate

NODES = (4, 8, 16, 64)


def main() -> None:
    options, overrides = _options()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(options.recipe, overrides)
    runs = [_trained(options.recipe, overrides, rows, output) for rows in options.rows]
    base = None
    found = []
    for run in runs:
        known = run / "acceptance.json"
        if not known.is_file():
            base = base or base_for_decoding(
                recipe.base.model, dtype=recipe.base.dtype, device=recipe.base.device
            )
            figures = _measured(base, run, options.held_out, options.test)
            write_json(known, figures)
        found.append(json.loads(known.read_text()))
    _write(found, recipe, output)


def _options() -> tuple[argparse.Namespace, list[str]]:
    given, overrides = sys.argv[1:], list[str]()
    if "--" in given:
        cut = given.index("--")
        given, overrides = given[:cut], given[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, required=True, help="trees are searched on these")
    parser.add_argument("--test", type=Path, required=True, help="and replayed on these")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(given), overrides


def _trained(recipe: Path, overrides: list[str], rows: int, output: Path) -> Path:
    run = output / f"rows-{rows}"
    if not (run / "run.json").is_file():
        changes = [*overrides, f"data.limit={rows}", f"output_dir={run}"]
        command = [sys.executable, "-m", "medusa_kit", "train", str(recipe), *changes]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run


def _measured(base: Any, run: Path, held_out: Path, test: Path) -> dict[str, Any]:
    record = json.loads((run / "run.json").read_text())
    itemsize = DTYPES[record["recipe"]["train"]["cache_dtype"]].itemsize
    heads = load_heads(run / "heads", base)
    fit, judge = (calibrate(base, heads, read_answers(path)) for path in (held_out, test))
    lengths = {
        nodes: round(replay(result.tree, judge).acceptance_length, 4)
        for nodes, result in best_trees(fit, NODES).items()
    }
    return {
        "rows": record["recipe"]["data"]["limit"],
        "positions": record["num_positions"],
        "updates": record["num_updates"],
        "training_seconds": record["seconds"],
        "hidden_state_bytes": itemsize * record["num_positions"] * base.info.hidden_size,
        "tree_positions": fit.num_positions,
        "test_positions": judge.num_positions,
        "top1": [round(float(share), 4) for share in judge.marginals()[:, 0]],
        "acceptance_length": lengths,
    }


def _write(found: list[dict[str, Any]], recipe: TrainRecipe, output: Path) -> None:
    write_json(output / "curve.json", {"recipe": recipe.model_dump(), "runs": found})
    columns = ["positions", *(f"N = {nodes}" for nodes in NODES), "top-1 of heads",
               "training", "hidden states"]  # fmt: skip
    rows = [
        [
            f"{one['positions']:,}",
            *(f"{one['acceptance_length'][str(nodes)]:.3f}" for nodes in NODES),
            " ".join(f"{share:.3f}".removeprefix("0") for share in one["top1"]),
            f"{one['training_seconds'] / 60:.0f} min",
            f"{one['hidden_state_bytes'] / 1e9:.2f} GB",
        ]
        for one in found
    ]
    text = console.markdown(columns, rows)
    write_text(output / "curve.md", text + "\n")
    print(text)
    _draw(found, output / "curve.svg")


def _draw(found: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    set_up_fonts(pyplot)
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    positions = [one["positions"] for one in found]
    for nodes in NODES:
        lengths = [one["acceptance_length"][str(nodes)] for one in found]
        axes.plot(positions, lengths, "o-", label=f"{nodes} nodes")
    axes.set_xscale("log")
    axes.set_xticks(positions, [f"{count / 1e3:,.0f}k" for count in positions], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("positions trained on")
    axes.set_ylabel("tokens a step (static trees)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
