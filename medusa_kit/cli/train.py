"""`medusa-kit train`: recipe in, heads out; with --quick, a model and prompts in."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_kit import console
from medusa_kit.cli import options
from medusa_kit.errors import UsageError

if TYPE_CHECKING:
    from medusa_kit.train.trainer import TrainReport


# Options that go with --quick alone, by the names of their parameters.
QUICK = {"model": "--model", "prompts": "--prompts", "answers": "--from", "hours": "--hours",
         "output": "--output", "device": "--device", "engine": "--for"}  # fmt: skip


Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start over: drop what an earlier run left there.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the plan, sizes and time estimate without training."),
]
Processes = Annotated[
    int, typer.Option("--nproc", min=1, help="Processes on this machine, one for each GPU.")
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Without a recipe: answers, heads, tree, verify and bench for --model in --hours.",
    ),
]
Prompts = Annotated[
    str | None, options.prompts_option(", which the model answers first (with --quick)")
]
Answers = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Answers that are there already, as serve --record writes them, in place of "
        "--prompts (with --quick).",
    ),
]
Hours = Annotated[float, typer.Option(help="Time budget in hours (with --quick).")]
Output = Annotated[
    Path | None,
    options.output_option("Folder for the results (with --quick); default: heads-MODEL."),
]
For = Annotated[
    str,
    typer.Option(
        "--for",
        metavar="ENGINE",
        help="Engine that is to load the heads: kit, vllm or tgi (with --quick).",
    ),
]


def train(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE", help="Recipe, a YAML file, see recipes/; not with --quick."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Changes to the recipe, for example train.epochs=2."
        ),
    ] = None,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    nproc: Processes = 1,
    quick: Quick = False,
    model: options.Model = options.DEFAULT_MODEL,
    prompts: Prompts = None,
    answers: Answers = None,
    hours: Hours = 2.0,
    output: Output = None,
    engine: For = "kit",
    device: options.Device = "auto",
) -> None:
    """Train Medusa heads, the base frozen or with it. Run it again after Ctrl-C to resume."""
    if quick:
        from medusa_kit.cli.quick import run_quick

        refused = {
            f"the {'setting' if '=' in str(recipe) else 'recipe'} {str(recipe)!r}": recipe,
            "--nproc": options.was_given(context, "nproc"),
        }
        run_quick([name for name, given in refused.items() if given], model, prompts, hours,
                  output, device, fresh, dry_run, engine, answers)  # fmt: skip
        return
    _check(context, recipe)
    assert recipe is not None
    _train(recipe, overrides or [], fresh, dry_run, nproc)


def _check(context: typer.Context, recipe: Path | None) -> None:
    if given := [flag for name, flag in QUICK.items() if options.was_given(context, name)]:
        raise UsageError(
            f"only --quick takes {', '.join(given)}",
            hint="a recipe has settings for these; or add --quick",
        )
    if recipe is None:
        raise UsageError("no recipe was given", hint="name one (see recipes/), or try --quick")


def _train(recipe: Path, overrides: list[str], fresh: bool, dry_run: bool, nproc: int) -> None:
    from medusa_kit.settings.recipe import dump, load_recipe

    loaded = load_recipe(recipe, overrides)
    if nproc > 1 and not dry_run:
        _launch(recipe, overrides, fresh, nproc)
        return
    from medusa_kit.train.processes.launch import end_with_launcher

    end_with_launcher()  # before what takes seconds to import
    from medusa_kit.infer.cpu.activations import check_before_loading
    from medusa_kit.infer.cpu.packed_base import base_for_decoding
    from medusa_kit.infer.runners.backends import check_base
    from medusa_kit.settings.engine import EngineConfig
    from medusa_kit.train.forecast.dry_run import dry_run as show
    from medusa_kit.train.trainer import train as run_training

    check_before_loading(EngineConfig(**loaded.base.model_dump()))
    if dry_run:
        console.out.print(dump(loaded), markup=False, highlight=False, soft_wrap=True)
        console.out.print(
            show(loaded, check_base, base_for_decoding),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return
    report = run_training(loaded, fresh, check_base, base_for_decoding)
    if console.is_main():
        _show(report)


def _launch(recipe: Path, overrides: list[str], fresh: bool, nproc: int) -> None:
    from medusa_kit.train.processes.launch import launch

    arguments = ["train", str(recipe), *overrides, *(["--fresh"] if fresh else [])]
    if code := launch(arguments, nproc):
        raise typer.Exit(code)
    sys.stdout.flush()


def _show(report: "TrainReport") -> None:
    scores = report.scores
    rows = [
        (
            f"{k} (token +{k + 2})",
            *(
                console.number(value, form)
                for value, form in ((loss, ".3f"), (top1, ".1%"), (top5, ".1%"))
            ),
        )
        for k, (loss, top1, top5) in enumerate(
            zip(scores.loss, scores.top1, scores.top5, strict=True)
        )
    ]
    console.out.print(console.table("held-out rows", ("head", "loss", "top-1", "top-5"), rows))
    if (quality := report.quality) is not None:
        lines = [
            ("perplexity of the original", console.number(quality.perplexity_before, ".4f")),
            ("perplexity now", console.number(quality.perplexity_after, ".4f")),
            ("same greedy token as the original", console.number(quality.same_token, ".2%")),
            ("held-out rows the same throughout", console.number(quality.same_answer, ".2%")),
        ]
        console.out.print(console.table("the base, a new model now", ("", "held-out"), lines))
    kept = "" if report.best is None else f"; acceptance length kept {report.best:.3f}"
    console.note(
        f"{report.num_updates} updates, {report.num_positions:,} training tokens an epoch, "
        f"{report.seconds:.0f} s{kept}; heads in {report.heads_folder}"
    )
