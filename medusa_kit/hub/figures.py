"""The card's measured parts: acceptance, speed, exactness, tree.

Every figure comes from a file beside the heads (measured.py). None is derived from another file's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from medusa_kit.engine.before_loading import TREE_NAME
from medusa_kit.engine.tree_precision import ACTIVATIONS
from medusa_kit.hub.markdown import table
from medusa_kit.hub.measured import TOP, Measured
from medusa_kit.hub.redact_paths import redact_paths
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.render import describe_tree, render_tree

NOT_MEASURED = "**Not measured.**"
LARGEST_TREE = 128  # nodes drawn
PLAIN = (", plain decoding", ", one node")  # ends of a method's name, the latter in old reports
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
    yield table(("prompt set", "how", "acceptance length", "by depth"), lines)
    if measured.replayed is not None:
        yield from _head_hits(measured)


def _replay_lines(measured: Measured) -> Iterator[tuple[str, ...]]:
    if (found := measured.replayed) is not None:
        result = found.result
        yield (
            f"{redact_paths(found.prompts) or 'calibration answers'} "
            f"({found.num_answers} answers held out, {result.tokens:,} tokens)",
            "replay of the tree below, greedy",
            f"{result.acceptance_length:.3f}",
            _shares(result.acceptance_by_depth),
        )


def _bench_lines(measured: Measured) -> Iterator[tuple[str, ...]]:
    for record in measured.benches:
        for method in record["methods"]:
            if method.get("acceptance_length") is not None and _drafts(method):
                yield (
                    _prompt_set(record),
                    f"{redact_paths(method['name'])}, {_sampling(record)}, "
                    f"batch {record.get('batch_size', 1)}",
                    f"{method['acceptance_length']:.3f}",
                    _shares(method.get("acceptance_by_depth") or ()),
                )


def _drafts(method: dict[str, Any]) -> bool:
    """Whether a method of this name in a bench is ours and drafts."""
    name = str(method["name"])
    others = ("transformers", "flashspec", "endpoint, ")
    return not name.startswith(others) and not name.endswith(PLAIN)


def _head_hits(measured: Measured) -> Iterator[str]:
    assert measured.replayed is not None
    rows = [
        (f"head {k + 1} (token +{k + 2})", *(f"{share:.1%}" for share in shares))
        for k, shares in enumerate(measured.replayed.hits_K)
    ]
    given = "" if measured.config.kind == "medusa" else ", given the true tokens it reads"
    yield (
        f"Each head by itself{given}, on {measured.replayed.num_positions:,} calibration "
        "tokens: how often the true token is among its first predictions."
    )
    yield table(("", *(f"top {top}" for top in TOP)), rows)


def speed(measured: Measured, pictures: Sequence[str]) -> Iterator[str]:
    if not measured.benches:
        yield (
            f"{NOT_MEASURED} `medusa-kit bench --heads FOLDER --output FOLDER` measures it against "
            "plain transformers generate, on your machine."
        )
    for record in measured.benches:
        yield f"**{_prompt_set(record)}**, {_sampling(record)}: {_machine(record)}."
        if precision := rounded_activations(record):
            yield f"{_held_within(precision)} {_agreement(record, 'bench')}"
        ran = [method for method in record["methods"] if "not_run" not in method]
        yield table(
            ("method", "tokens/s", "ratio", "acceptance length", "same answers"),
            [_speed_row(redact_paths(method)) for method in ran],
        )
        for method in record["methods"]:
            if "not_run" in method:
                shown = redact_paths(method)
                yield f"{shown['name']}: not run ({shown['not_run']})."
    yield from _pictures(pictures, "bench", "Tokens a second")


def _speed_row(method: dict[str, Any]) -> tuple[str, ...]:
    length, same = method.get("acceptance_length"), method.get("identical")
    return (
        method["name"],
        f"{method['tokens_per_second']:.1f}",
        f"{method['ratio']:.2f} ×",
        "–" if length is None else f"{length:.3f}",
        "–" if same is None else f"{same} of {method['answers']}",
    )


def _prompt_set(record: dict[str, Any]) -> str:
    name = redact_paths(record.get("prompts")) or "prompts without a recorded name"
    return f"{name} ({record['num_prompts']} prompts)"


def _sampling(record: dict[str, Any]) -> str:
    drawn = record.get("sampling") or {}
    if not drawn.get("temperature"):
        return "greedy"
    return f"temperature {drawn['temperature']}, seed {drawn['seed']}"


def _machine(record: dict[str, Any]) -> str:
    setup, base = record.get("setup") or {}, record.get("base") or {}
    parts = [
        setup.get("processor", "processor not recorded"),
        f"device {base.get('device', 'not recorded')}",
        f"{base.get('dtype', 'dtype not recorded')}",
        *([f"{precision} activations"] if (precision := rounded_activations(record)) else []),
        f"threads {setup.get('threads', 'not recorded')}",
        f"batch {record.get('batch_size', 1)}",
        *(f"{name} {setup[name]}" for name in ("torch", "transformers") if name in setup),
        *([f"steps by {setup['steps_run_by']}"] if "steps_run_by" in setup else []),
    ]
    return ", ".join(str(part) for part in parts)


def rounded_activations(record: dict[str, Any]) -> str | None:
    """The precision that a report names; None for float32, as in reports that name none."""
    precision = record.get(ACTIVATIONS, FLOAT32)
    return None if precision == FLOAT32 else str(precision)


def _held_within(precision: str) -> str:
    return f"With {precision} activations answers are held to plain decoding in the same precision."


def _agreement(record: dict[str, Any], how: str) -> str:
    """With the answers that float32 gives."""
    if (found := record.get("agreement_with_float32")) is None:
        return f"Agreement with float32 ({how}): not measured."
    return (
        f"Agreement with float32 ({how}): {found['same']} of {found['answers']} answers are those "
        f"of plain transformers; {found['same_tokens']:,} of {found['tokens']:,} tokens come "
        "before a first difference."
    )


def exactness(measured: Measured) -> Iterator[str]:
    if measured.verify is None:
        yield (
            f"{NOT_MEASURED} `medusa-kit verify --heads FOLDER --output FOLDER/verify.json` holds "
            "every token to plain transformers on an untouched second model."
        )
        return
    first = measured.verify["greedy"]
    # Older files call it "noise".
    tolerance = first.get("rounding_tolerance", first.get("noise"))
    rows = [
        (
            how,
            redact_paths(part.get("prompts")) or "not recorded",
            part.get("drafter", "not recorded"),
            f"{part['identical']} of {part['num_prompts']}",
            f"{part['num_tokens']:,}",
            str(len(part["differences"]) - part["bugs"]),
            str(part["bugs"]),
        )
        for how, part in measured.verify.items()
    ]
    columns = ("decoding", "prompt set", "drafter", "identical answers", "tokens",
               "rounding", "more than rounding")  # fmt: skip
    rounding = (
        "Rounding: the two tokens' logits differ by less than the tolerance measured at load "
        f"({tolerance:.1e})."
    )
    if precision := rounded_activations(first):
        yield f"{_held_within(precision)} {rounding}"
        yield from (_agreement(part, how) for how, part in measured.verify.items())
    else:
        yield (
            "Greedy answers are held to plain transformers generate on an untouched second model, "
            f"sampled ones to one-node decoding with the same seed, token by token. {rounding}"
        )
    yield table(columns, rows)
    if first.get("setup"):
        yield f"Measured on {_machine(first)}."
    if any(part["bugs"] for part in measured.verify.values()):
        yield "**Some differences are more than rounding: these heads are not exact here.**"
    if first.get("encodings"):
        yield "**Prompts are encoded otherwise than the base's tokenizer.json says.**"


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
    machine = tree.get("machine", {})
    yield (
        f"{_chosen(rows, plan)}, over one-node decoding in the same engine, on "
        f"{machine.get('processor', 'a processor not recorded')}, device "
        f"{machine.get('device', 'not recorded')}, threads {machine.get('threads', '?')}, torch "
        f"{machine.get('torch', '?')}{_found_with(tree)}; another machine may want "
        "another tree (`medusa-kit tree-search --statistics`). Acceptance by replay, step times "
        "measured."
    )
    columns = ("nodes", "acceptance length", "step, ms", "predicted speed-up")
    yield table(columns, [_search_row(row) for row in rows])


def _found_with(tree: dict[str, Any]) -> str:
    precision = rounded_activations(tree)
    return f", {precision} activations" if precision else ""


def _chosen(rows: Sequence[dict[str, Any]], plan: Any) -> str:
    """What the table below says of the tree above."""
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
