"""`medusa-kit train`: recipe in, heads out."""

from pathlib import Path
from typing import Annotated

import typer

from medusa_kit import console


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe, a YAML file; see recipes/.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to it, section.key=value (for example train.epochs=2)."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: drop what an older run left there.")
    ] = False,
) -> None:
    """Train Medusa heads on a frozen base model. Run it again after Ctrl-C to go on."""
    from medusa_kit.config import load_recipe
    from medusa_kit.infer.tree_check import prove_trees
    from medusa_kit.train.trainer import train as run_training

    report = run_training(load_recipe(recipe, overrides or []), fresh, prove_trees)
    scores = report.scores
    rows = [
        (f"{k} (token +{k + 2})", f"{loss:.3f}", f"{top1:.1%}", f"{top5:.1%}")
        for k, (loss, top1, top5) in enumerate(
            zip(scores.loss, scores.top1, scores.top5, strict=True)
        )
    ]
    console.out.print(console.table("held-out rows", ("head", "loss", "top-1", "top-5"), rows))
    console.note(
        f"{report.num_updates} updates, {report.num_positions:,} positions an epoch, "
        f"{report.seconds:.0f} s; heads in {report.heads_folder}"
    )
