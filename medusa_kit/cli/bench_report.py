"""What a bench prints: tables and remarks. bench/report.py writes its file."""

import textwrap
from collections.abc import Mapping
from typing import Any

from medusa_kit import console
from medusa_kit.cli.chat import notes
from medusa_kit.settings.engine import FLOAT32

LOSSY = "lossy"  # in the column that says how many answers are the same
# Characters of a method's name, and of the reason why it was not run; of the other columns.
NAME_WIDTH, MIN_NAME_WIDTH, OTHERS_WIDTH = 26, 16, 64


def show(
    report: Any, breakdowns: dict[str, Any], what: str, where: str, caveat: str | None = None
) -> None:
    """Print what was measured. `caveat`: what exact means."""
    from medusa_kit.bench.methods import not_paying

    title = (
        f"{what}: {console.counted(report.num_prompts, 'prompt')}, "
        f"{report.max_new_tokens} new tokens, "
        f"{report.about.sampled}, batch {report.batch_size}\n{where}"
    )
    console.out.print(_methods_table(report, title))
    if caveat is not None:
        console.note(caveat)
    lines = [
        "decoding only: tokens/s after the first, prefill excluded; gain: of drafting, by these, "
        "over our own plain decoding" + _meaning_of_same(report),
        *_agreement(report),
        *_doubts(report),
        *(f"{result.name}: {note}" for result in report.ran for note in result.drafter_notes),
        *not_paying(report),
    ]
    console.out.print("\n".join(lines), markup=False, highlight=False)
    # A category of one prompt says nothing; the file has them all.
    if any(report.ran[0].categories[name].answers > 1 for name in report.categories):
        console.out.print(_category_table(report))
    if breakdowns:
        console.out.print(breakdown_table(breakdowns, "a step, ms (medians)"))


def _meaning_of_same(report: Any) -> str:
    lossy = f"; {LOSSY}: another model's answers" if any(r.lossy for r in report.ran) else ""
    known = [result.total.identical is not None for result in report.ran if not result.lossy]
    if not any(known):
        return lossy
    drawn = report.about.sampling.get("temperature") and not all(known)
    others = "; others draw other random numbers" if drawn else ""
    return (
        f"; same: answers that equal those of {_references(report)}, token for token{others}{lossy}"
    )


def _references(report: Any) -> str:
    """The references that answers were compared with, once for each precision of them."""
    compared = [result for result in report.ran if result.total.identical is not None]
    precisions = {result.identical_to: notes.precision_of(result) for result in compared}
    if len(precisions) == 1:
        return str(next(iter(precisions)))
    return ", or ".join(
        f"{name} ({precision or FLOAT32})" for name, precision in precisions.items()
    )


def _agreement(report: Any) -> list[str]:
    if all(result.activations == FLOAT32 for result in report.ran):
        return []
    if report.agreement is None:
        return [
            "agreement with float32: not measured; it is of greedy answers that transformers gives"
        ]
    return [f"{report.identical_to}: {report.agreement.describe(report.results[0].name)}"]


def _doubts(report: Any) -> list[str]:
    lines = [] if report.doubt is None else [report.doubt]
    if report.loops and not report.says_nothing:
        which = "they are"
        if report.left_out > report.loops:
            which = f"their batches, {report.left_out} prompts in all, are"
        lines.insert(
            0,
            f"{report.loops} of {report.num_prompts} answers end in a loop, one span "
            f"over and over: {which} left out of all figures but those of same answers",
        )
    return lines


def _methods_table(report: Any, title: str) -> Any:
    rows, first = list[tuple[str, ...]](), report.results[0].total
    width = max(MIN_NAME_WIDTH, min(NAME_WIDTH, console.out.width - OTHERS_WIDTH))
    for result in report.results:
        name = textwrap.fill(result.name, width)
        if result.not_run is not None:
            why = textwrap.fill(f"not run: {result.not_run}", width)
            rows.append((f"{name}\n{why}", *["–"] * 6))
            continue
        total = result.total
        same = "–" if total.identical is None else f"{total.identical}/{total.answers}"
        same = LOSSY if result.lossy else same
        rows.append(
            (
                name,
                f"{total.tokens_per_second:.1f}",
                console.times(total.ratio(first)),
                console.number(total.decoding_tokens_per_second, ".1f"),
                _gain(report, result),
                console.number(total.acceptance_length, ".3f"),
                same,
            )
        )
    columns = ("method", "tokens/s", "ratio", "decoding\nonly", "gain", "accept.\nlength", "same")
    return console.table(title, columns, rows)


def _gain(report: Any, result: Any) -> str:
    """Drafting's gain: the speed of decoding against the kit's own plain decoding."""
    plain = report.plain
    if plain is None or result.plain or not result.drafts or report.says_nothing:
        return "–"
    return console.times(result.total.decoding_ratio(plain.total))


def _category_table(report: Any) -> Any:
    first, *others = report.ran
    rows = []
    for category in report.categories:
        cells, base = [], first.categories[category]
        for result in others:
            tally = result.categories[category]
            cells.append(_with_length(console.times(tally.ratio(base)), tally))
        speed = _with_length(f"{base.tokens_per_second:.1f}", base)
        rows.append((category, base.answers, speed, *cells))
    names = [result.name.removeprefix("transformers ").removeprefix("medusa-kit, ")
             for result in report.ran]  # fmt: skip
    columns = ("category", "prompts", f"{names[0]}, tokens/s", *names[1:])
    title = f"by category: ratio to {first.name} (acceptance length)"
    return console.table(title, columns, rows)


def _with_length(speed: str, tally: Any) -> str:
    length = tally.acceptance_length
    return speed if length in (None, 1.0) else f"{speed} ({length:.2f})"


def breakdown_table(breakdowns: dict[str, Any], title: str) -> Any:
    """Parts of a step in ms, one column each. `breakdowns`: as `break_down` returns them."""
    from medusa_kit.bench.breakdown import KERNELS, OTHER, PARTS

    found = list(breakdowns.values())
    kinds = [kind for kind in (*KERNELS, OTHER) if any(kind in one.kernels for one in found)]
    rows = [
        *((part, *(f"{one.parts[part] * 1e3:.2f}" for one in found)) for part in PARTS),
        *(
            (f"kernels: {kind}", *(f"{one.kernels[kind] * 1e3:.2f}" if kind in one.kernels else "–"
                                   for one in found))
            for kind in kinds
        ),
        ("step", *(f"{one.step_seconds * 1e3:.2f}" for one in found)),
        ("reading the weights once", *(f"{one.floor_seconds * 1e3:.2f}" for one in found)),
        ("weights, MB", *(f"{one.weight_bytes / 1e6:,.1f}" for one in found)),
        ("nodes of a request", *(f"{one.num_nodes:.2f}" for one in found)),
        ("steps", *(one.num_steps for one in found)),
    ]  # fmt: skip
    return console.table(title, ("part", *breakdowns), rows)


def engine_title(engine: Any, setup: Mapping[str, Any]) -> tuple[str, str]:
    """(what was measured, where)."""
    info = engine.base.info
    return (
        f"{info.name}, {info.dtype}, {info.device}, attention {engine.attention.name}"
        f"{notes.weights_note(engine)}",
        f"steps by {setup['steps_run_by']}; {setup['processor']}, threads {setup['threads']}, "
        f"torch {setup['torch']}, transformers {setup['transformers']}",
    )
