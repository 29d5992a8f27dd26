"""The card's measured parts: acceptance, speed, exactness, tree.

Every figure comes from a file beside the heads (measured.py). None is derived from another file's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from medusa_kit import console
from medusa_kit.bench.about import About
from medusa_kit.bench.agreement import Agreement
from medusa_kit.bench.report import BenchReport, Tally
from medusa_kit.engine.tree_precision import ACTIVATIONS
from medusa_kit.heads.derived import TREE_NAME
from medusa_kit.hub.measured import TOP, Measured
from medusa_kit.hub.redact_paths import redact_paths
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.render import describe_tree, render_tree

NOT_MEASURED = "**Not measured.**"
LARGEST_TREE = 128  # nodes drawn
CLOSE = 0.95  # predictions that differ by less are no reason to choose another tree


def acceptance(measured: Measured) -> Iterator[str]:
    yield (
        "Acceptance length is (tokens emitted - 1) / forwards of the base model: plain decoding is "
        "1. By depth: the share of steps whose accepted path got at least that deep."
    )
    lines = [*_replay_lines(measured), *_bench_lines(measured)]
    if not lines:
        yield (
            f"{NOT_MEASURED} `medusa-kit tree-search --heads FOLDER --prompts PROMPTS` measures it "
            "by replay, `medusa-kit bench --heads FOLDER --output FOLDER` on whole answers."
        )
        return
    yield console.markdown(("prompt set", "how", "acceptance length", "by depth"), lines)
    if measured.replayed is not None:
        yield from _head_hits(measured)


def _replay_lines(measured: Measured) -> Iterator[tuple[str, ...]]:
    if (replayed := measured.replayed) is not None:
        result = replayed.result
        yield (
            f"{redact_paths(replayed.prompts) or 'calibration answers'} "
            f"({replayed.num_answers} answers held out, {result.tokens:,} tokens)",
            "replay of the tree below, greedy",
            f"{result.acceptance_length:.3f}",
            _shares(result.acceptance_by_depth),
        )


def _bench_lines(measured: Measured) -> Iterator[tuple[str, ...]]:
    for report in measured.benches:
        for result in report.ran:
            length = result.total.acceptance_length
            if length is not None and result.drafts:
                yield (
                    _prompt_set(report),
                    f"{redact_paths(result.name)}, {report.about.sampled}, "
                    f"batch {report.batch_size}",
                    f"{length:.3f}",
                    _shares(result.total.acceptance_by_depth),
                )


def _head_hits(measured: Measured) -> Iterator[str]:
    assert measured.replayed is not None
    rows = [
        (f"head {k + 1} (token +{k + 2})", *(f"{share:.1%}" for share in shares))
        for k, shares in enumerate(measured.replayed.hits_K)
    ]
    given = ", given the true tokens it reads" if measured.config.reads_path else ""
    yield (
        f"Each head by itself{given}, on {measured.replayed.num_positions:,} calibration "
        "tokens: how often the true token is among its first predictions."
    )
    yield console.markdown(("", *(f"top {top}" for top in TOP)), rows)


def speed(measured: Measured, pictures: Sequence[str]) -> Iterator[str]:
    if not measured.benches:
        yield (
            f"{NOT_MEASURED} `medusa-kit bench --heads FOLDER --output FOLDER` measures it against "
            "plain transformers generate, on your machine."
        )
    for report in measured.benches:
        machine = _machine(report.about, report.batch_size)
        yield f"**{_prompt_set(report)}**, {report.about.sampled}: {machine}."
        if report.about.activations != FLOAT32:
            yield f"{_compared_within(report.about)} {_agreement(report.agreement, 'bench')}"
        yield console.markdown(
            ("method", "tokens/s", "ratio", "acceptance length", "same answers"),
            [_speed_row(redact_paths(result.name), result.total, report) for result in report.ran],
        )
        if report.doubt is not None:
            yield f"**{report.doubt[0].upper()}{report.doubt[1:]}.**"
        for result in report.results:
            if result.not_run is not None:
                name, why = redact_paths([result.name, result.not_run])
                yield f"{name}: not run ({why})."
    yield from _pictures(pictures, "bench", "Tokens a second")


def _speed_row(name: str, total: Tally, report: BenchReport) -> tuple[str, ...]:
    return (
        name,
        f"{total.tokens_per_second:.1f}",
        console.times(total.ratio(report.results[0].total)),
        console.number(total.acceptance_length, ".3f"),
        "–" if total.identical is None else f"{total.identical} of {total.answers}",
    )


def _prompt_set(report: BenchReport) -> str:
    name = redact_paths(report.about.prompts) or "prompts without a recorded name"
    return f"{name} ({console.counted(report.num_prompts, 'prompt')})"


def _machine(about: About, batch_size: int = 1) -> str:
    setup, base = about.setup, about.base
    rounded = about.activations != FLOAT32
    parts = [
        setup.get("processor", "processor not recorded"),
        f"device {base.get('device', 'not recorded')}",
        f"{base.get('dtype', 'dtype not recorded')}",
        *([f"{about.activations} activations"] if rounded else []),
        f"threads {setup.get('threads', 'not recorded')}",
        f"batch {batch_size}",
        *(f"{name} {setup[name]}" for name in ("torch", "transformers") if name in setup),
        *([f"steps by {setup['steps_run_by']}"] if "steps_run_by" in setup else []),
    ]
    return ", ".join(str(part) for part in parts)


def _compared_within(about: About) -> str:
    return (
        f"With {about.activations} activations answers are held to plain decoding in the same "
        "precision."
    )


def _agreement(agreement: Agreement | None, how: str) -> str:
    """The sentence about agreement with the answers that float32 gives."""
    if agreement is None:
        return f"Agreement with float32 ({how}): not measured."
    return (
        f"Agreement with float32 ({how}): {agreement.same} of {agreement.answers} answers are "
        f"those of plain transformers; {agreement.same_tokens:,} of {agreement.tokens:,} tokens "
        "come before a first difference."
    )


def exactness(measured: Measured) -> Iterator[str]:
    if not measured.verify:
        yield (
            f"{NOT_MEASURED} `medusa-kit verify --heads FOLDER --output FOLDER/verify.json` holds "
            "every token to plain transformers on an untouched second model."
        )
        return
    first = measured.verify["greedy"]
    rows = [
        (
            how,
            redact_paths(part.about.prompts) or "not recorded",
            part.drafter or "not recorded",
            f"{part.identical} of {part.num_prompts}",
            f"{part.num_tokens:,}",
            str(len(part.differences) - len(part.bugs)),
            str(len(part.bugs)),
        )
        for how, part in measured.verify.items()
    ]
    columns = ("decoding", "prompt set", "drafter", "identical answers", "tokens",
               "rounding", "more than rounding")  # fmt: skip
    rounding = (
        "Rounding: the two tokens' logits differ by less than the tolerance measured at load "
        f"({first.rounding_tolerance:.1e})."
    )
    if first.about.activations != FLOAT32:
        yield f"{_compared_within(first.about)} {rounding}"
        yield from (_agreement(part.agreement, how) for how, part in measured.verify.items())
    else:
        yield (
            "Greedy answers are held to plain transformers generate on an untouched second model, "
            f"sampled ones to one-node decoding with the same seed, token by token. {rounding}"
        )
    yield console.markdown(columns, rows)
    if first.about.setup:
        yield f"Measured on {_machine(first.about)}."
    if any(part.bugs for part in measured.verify.values()):
        yield "**Some differences are more than rounding: these heads are not exact here.**"
    if first.encodings:
        yield "**Prompts are tokenized differently than the base's tokenizer.json says.**"


def tree(measured: Measured, pictures: Sequence[str]) -> Iterator[str]:
    if measured.plan is None:
        yield (
            f"{NOT_MEASURED} Without {TREE_NAME} each head's likeliest token is drafted in a "
            "chain; `medusa-kit tree-search --heads FOLDER --prompts PROMPTS` finds a tree."
        )
        return
    tree = measured.plan.for_batch(1)
    values = measured.replayed.values_N if measured.replayed else None
    if not isinstance(tree, CandidateTree):
        drawn = describe_tree(tree)
    elif tree.num_nodes > LARGEST_TREE:
        drawn = f"{tree.num_nodes} nodes, depth {tree.depth}: see {TREE_NAME}"
    else:
        drawn = render_tree(tree, values)
        yield "A node is the rank of a head's draft token" + (
            ", and the share of steps that accept it." if values else "."
        )
    yield f"```text\n{drawn}\n```"
    yield from _search_table(measured.tree or {}, tree)
    yield from _pictures(pictures, "tree", "Trees compared")


def _search_table(tree: dict[str, Any], plan: Any) -> Iterator[str]:
    """`plan`: the tree that decodes."""
    rows = [row for row in tree.get("table", []) if row.get("batch_size", 1) == 1]
    if not rows:
        return
    machine, precision = tree.get("machine", {}), tree.get(ACTIVATIONS, FLOAT32)
    rounded = "" if precision == FLOAT32 else f", {precision} activations"
    yield (
        f"{_chosen(rows, plan)}, over one-node decoding in the same engine, on "
        f"{machine.get('processor', 'a processor not recorded')}, device "
        f"{machine.get('device', 'not recorded')}, threads {machine.get('threads', '?')}, torch "
        f"{machine.get('torch', '?')}{rounded}; another machine may want "
        "another tree (`medusa-kit tree-search --statistics`). Acceptance by replay, step times "
        "measured."
    )
    columns = ("nodes", "acceptance length", "step, ms", "predicted speed-up")
    yield console.markdown(columns, [_search_row(row) for row in rows])


def _chosen(rows: Sequence[dict[str, Any]], plan: Any) -> str:
    """A sentence on how the tree above compares with those of the table below."""
    dynamic = not isinstance(plan, CandidateTree)
    own = [
        row["predicted_speed_up"]
        for row in rows
        if row["num_nodes"] == plan.num_nodes and bool(row.get("dynamic")) == dynamic
    ]
    best = max(row["predicted_speed_up"] for row in rows)
    if round(best, 2) <= 1:
        return "None of these was predicted to be faster; predicted speed-up is"
    if not own:
        return "The tree above is none of these, which were compared by predicted speed-up"
    if max(own) >= CLOSE * best:
        return "Chosen among these for its predicted speed-up"
    return "Another of these has more predicted speed-up than the tree above; it is"


def _search_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['num_nodes']}{' dynamic' if row.get('dynamic') else ''}",
        f"{row['acceptance_length']:.3f}",
        f"{row['step_ms']:.1f}",
        f"{row['predicted_speed_up']:.2f} ×",
    )


def _pictures(pictures: Sequence[str], kind: str, title: str) -> Iterator[str]:
    yield from (f"![{title}]({name})" for name in pictures if name.startswith(kind))


def _shares(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares) or "–"
