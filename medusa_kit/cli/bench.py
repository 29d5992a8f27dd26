"""`medusa-kit bench`: tokens a second against plain transformers, in one interleaved run."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.cli import options
from medusa_kit.cli.prompts import load_both, read_prompts
from medusa_kit.files import atomic_write


def bench(
    model: options.Model = options.DEFAULT_MODEL,
    heads: Annotated[
        list[str] | None,
        typer.Option(help="Heads to compare, auto unless given; may be repeated (name=FOLDER)."),
    ] = None,
    tree: options.Tree = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompts (file or data set); the kit's own unless given.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take this many prompts.")] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    output: Annotated[
        Path | None, typer.Option(help="Folder for bench.json and bench.png.")
    ] = None,
    dtype: options.DType = "float32",
    device: options.Device = "auto",
    attention: options.Attention = "auto",
    force: options.Force = False,
) -> None:
    """Plain transformers generate, its prompt lookup, and ours, interleaved on the same prompts."""
    from medusa_kit.bench.bench import bench as run
    from medusa_kit.bench.bench import standard_methods

    asked = read_prompts(prompts, limit)
    named = _named(heads or ["auto"])
    first = options.heads_argument(next(iter(named.values())))
    engine, oracle = load_both(
        model, heads=first, tree=tree, dtype=dtype, device=device, attention=attention,
        force=force,
    )  # fmt: skip
    engines = _engines(engine, named, force)
    methods = standard_methods(engines, oracle, max_new_tokens)
    report = run(methods, [engine.encode(prompt) for prompt in asked], max_new_tokens)
    _print(engine, report)
    if output is not None:
        _write(report, engine, output)


def _named(heads: list[str]) -> dict[str, str]:
    """Names in the table for the heads to compare: `fresh=runs/x/heads` or just the folder."""
    named = {}
    for one in heads:
        name, _, place = one.rpartition("=")
        named[name or ("medusa-kit" if one == "auto" else f"medusa-kit, {one}")] = place
    return named


def _engines(first: Any, named: dict[str, str], force: bool) -> dict[str, Any]:
    """One engine for each set of heads, all around the same base model and verifier."""
    from medusa_kit.infer.loading import with_heads

    names = list(named)
    engines = {names[0]: first}
    for name in names[1:]:
        engines[name] = with_heads(first, options.heads_argument(named[name]), force=force)
    return engines


def _print(engine: Any, report: Any) -> None:
    rows = []
    for result in report.results:
        length = result.acceptance_length
        depths = " ".join(f"{share:.2f}" for share in result.acceptance_by_depth)
        rows.append(
            (
                result.name,
                f"{result.tokens_per_second:.1f}",
                f"{report.ratio(result):.2f} ×",
                f"{report.median_ratio(result):.2f} ×",
                "–" if length is None else f"{length:.3f}",
                depths or "–",
                f"{result.identical}/{report.num_prompts}",
            )
        )
    info = engine.base.info
    columns = ("method", "tokens/s", "ratio", "median ratio", "accept. length",
               "by depth", "identical")  # fmt: skip
    title = (
        f"{info.name}, {info.dtype}, {info.device}, attention {engine.verifier.attention.name}: "
        f"{report.num_prompts} prompts, {report.max_new_tokens} new tokens, greedy, batch 1"
    )
    console.out.print(console.table(title, columns, rows))


def _write(report: Any, engine: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    attention = engine.verifier.attention.report()
    record = {"base": engine.base.info.as_dict(), "attention": attention, **report.as_dict()}
    with atomic_write(folder / "bench.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n")
    console.note(f"wrote {folder / 'bench.json'}")
    try:
        from medusa_kit.infer.plots import plot_bench
    except ImportError:
        console.note("no chart: matplotlib is not installed (pip install 'medusa-kit[plot]')")
        return
    names = [result.name for result in report.results]
    rates = [result.tokens_per_second for result in report.results]
    plot_bench(names, rates, f"{engine.base.info.name}, greedy", folder / "bench.png")
    console.note(f"wrote {folder / 'bench.png'}")
