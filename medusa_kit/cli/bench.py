"""`medusa-kit bench`: tokens a second against plain transformers, in one interleaved run."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.cli import bench_endpoint, bench_report, engine_options, options
from medusa_kit.cli.chat import notes
from medusa_kit.cli.prompts import OWN_PROMPTS, load_both, read_prompt_set
from medusa_kit.settings.sampling import SamplingParams

DEFAULT_PEERS = ("transformers", "prompt-lookup")

Prompts = Annotated[
    str | None,
    options.prompts_option(
        ", with categories (as MT-bench and Spec-Bench have) or without; default: those shipped"
    ),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        help="Other methods on the same model, by commas or repeated: prompt-lookup, compiled, "
        "assisted, flashspec, or transformers for none of them; default: prompt-lookup."
    ),
]

Drafters = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Drafters to compare, by commas or repeated; default: that of --drafter. Options of "
        "--drafter-option are for --drafter alone.",
    ),
]


Heads = Annotated[
    list[str] | None,
    typer.Option(help="Heads to compare (FOLDER or NAME=FOLDER); may be repeated; default: auto."),
]
Assistant = Annotated[
    str | None,
    typer.Option(
        help="A smaller model that drafts for the peers assisted and flashspec; default for "
        "assisted: that of --draft-model."
    ),
]


@engine_options.with_engine(several=True)
@bench_endpoint.with_server
@options.with_sampling(only=("temperature", "seed"))
def bench(
    loading: engine_options.Loading = engine_options.GIVEN,
    heads: Heads = None,
    drafters: Drafters = None,
    prompts: Prompts = None,
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = 128,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Prompts decoded together, all of one category.")
    ] = 1,
    sampling: options.Sampling = options.GIVEN,
    peers: Peers = None,
    assistant: Assistant = None,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Report where a step's time goes.")
    ] = False,
    server: bench_endpoint.Server | None = None,
    output: Annotated[
        Path | None, options.output_option("Folder for bench.json and bench.png.")
    ] = None,
    given_names: frozenset[str] = frozenset(),
) -> None:
    """Benchmark transformers, its speculative modes, medusa-kit and optionally a server.

    All answer the same prompts, interleaved.
    """
    from medusa_kit.bench.methods import named_drafters
    from medusa_kit.bench.peers import assistant_for, named_peers
    from medusa_kit.data.without_template import tell_template

    params = SamplingParams.of(sampling)
    if server is not None:
        server.check(given_names, batch_size)
    draft_model = loading["draft_model"]
    assistant = assistant_for(peers or DEFAULT_PEERS, assistant, draft_model)
    names = named_peers(peers or DEFAULT_PEERS, assistant)
    compared = named_drafters(drafters or (), draft_model)
    prompt_set = read_prompt_set(prompts, limit)
    source = prompts or OWN_PROMPTS
    served = None if server is None else server.open(loading["model"], max_new_tokens, params)
    if output is not None:
        _check_place(output, served is not None and bool(served.loads))
    if served is not None and served.apart:
        return served.measure_apart(prompt_set, source, output, loading)
    console.note(
        f"{console.counted(len(prompt_set), 'prompt')} of at most {max_new_tokens} new tokens, "
        "answered by each method in turn; the model is loaded twice, for medusa-kit and for "
        "transformers"
    )
    named = _named(heads) if heads else {"medusa-kit": loading.get("heads", "auto") or "none"}
    first = options.heads_argument(next(iter(named.values())))
    _check_others(list(named.values())[1:], loading)
    engine, oracle = load_both({**loading, "heads": first})
    tell_template(engine.base.tokenizer, engine.base.info.name)
    engines = _engines(engine, named, loading["force"])
    helper = _assistant(assistant, engine)
    report, breakdowns = _measure(
        engines, oracle, prompt_set, max_new_tokens, batch_size, params, names, compared, helper,
        breakdown, served,
    )  # fmt: skip
    asked = [messages for messages, _ in prompt_set]
    _report(report, breakdowns, engines, params, source, asked, output, served)


def _measure(
    engines: dict[str, Any], oracle: Any, prompt_set: Any, max_new_tokens: int, batch_size: int,
    sampling: Any, peers: list[str], drafters: list[str], assistant: Any, breakdown: bool,
    served: bench_endpoint.Served | None,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """(the report, breakdowns by method)."""
    from medusa_kit.bench.bench import bench as run
    from medusa_kit.bench.breakdown import break_down
    from medusa_kit.bench.methods import check_room, standard_methods

    engine = next(iter(engines.values()))
    ids = [engine.encode(messages) for messages, _ in prompt_set]
    check_room(engine.base, ids)
    methods = standard_methods(
        engines, oracle, max_new_tokens, peers=peers, drafters=drafters, assistant=assistant,
        sampling=sampling, batch_size=batch_size,
    )  # fmt: skip
    if served is not None:
        beside = served.beside(prompt_set, ids, engine.base.tokenizer)
        methods.append(replace(beside, activations=engine.activations))
    report = run(
        methods, ids, max_new_tokens, batch_size=batch_size,
        categories=[category for _, category in prompt_set], sampled=not sampling.greedy,
    )  # fmt: skip
    if not breakdown:
        return report, {}
    return report, break_down(engines, ids[:batch_size], max_new_tokens, sampling)


def _assistant(name: str | None, engine: Any) -> Any:
    if name is None:
        return None
    from medusa_kit.base.loading import load_base_model

    info = engine.base.info
    return load_base_model(name, dtype=info.dtype, device=info.device)


def _report(
    report: Any, breakdowns: dict[str, Any], engines: dict[str, Any], sampling: Any, prompts: str,
    asked: list[Any], output: Path | None, served: bench_endpoint.Served | None,
) -> None:  # fmt: skip
    from medusa_kit.bench.machine import bench_about

    engine = next(iter(engines.values()))
    more: dict[str, Any] = {} if served is None else {"endpoint": served.record()}
    more["breakdown"] = {name: asdict(breakdown) for name, breakdown in breakdowns.items()}
    report.about = bench_about(engines, prompts, sampling, asked, **more)
    what, where = bench_report.engine_title(engine, report.about.setup)
    bench_report.show(report, breakdowns, what, where, notes.quantised_note(engine))
    if output is not None:
        report.write(engine.base.info.name + notes.weights_note(engine), output)


def _named(heads: list[str]) -> dict[str, str]:
    """Names in the table for the heads to compare: `fresh=runs/x/heads` or just the folder."""
    named = {}
    for item in heads:
        name, _, folder = item.rpartition("=")
        named[name or ("medusa-kit" if item == "auto" else f"medusa-kit, {item}")] = folder
    return named


def _check_others(others: list[str], loading: engine_options.Loading) -> None:
    """Errors in the second and later heads are reported before a base is loaded, too."""
    from medusa_kit.engine.before_loading import check_heads
    from medusa_kit.settings.drafters import drafts_without_heads

    has_draft_model = loading["draft_model"] is not None
    optional = drafts_without_heads(loading["drafter"], has_draft_model, loading.get("fallback"))
    for folder in others:
        check_heads(
            loading["model"], loading.get("revision"), options.heads_argument(folder), None,
            loading["force"], optional,
        )  # fmt: skip


def _check_place(output: Path, under_load: bool) -> None:
    from medusa_kit.bench.load import report as load_report
    from medusa_kit.bench.report import BenchReport

    (load_report.check_place if under_load else BenchReport.check_place)(output)


def _engines(first: Any, named: dict[str, str], force: bool) -> dict[str, Any]:
    """One engine for each set of heads, all with the same base model and verifier."""
    from medusa_kit.engine.load import with_heads

    names = list(named)
    engines = {names[0]: first}
    for name in names[1:]:
        engines[name] = with_heads(first, options.heads_argument(named[name]), force=force)
    return engines
