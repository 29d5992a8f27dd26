"""What the demo prints: explanations, tables, and what to type next."""

from collections.abc import Mapping

from medusa_kit import console
from medusa_kit.bench.interval import Interval
from medusa_kit.bench.report import ONE_NODE, TRANSFORMERS
from medusa_kit.demo import curve
from medusa_kit.demo.comparison import Comparison, Size
from medusa_kit.demo.own_heads import DemoFiles, Trained
from medusa_kit.demo.work import Work

SHIPPED, OWN = "the kit's", "your"  # whose heads, as engines are named
NAMES = {
    TRANSFORMERS: "transformers",
    ONE_NODE: "plain decoding",
    f"{SHIPPED}, medusa": "the kit's heads",
    f"{SHIPPED}, auto": "auto (default)",
    f"{OWN}, medusa": "the heads trained now",
}
SUBJECTS = {
    f"{SHIPPED}, medusa": "the kit's heads",
    f"{SHIPPED}, auto": "auto, which drafts from the text so far too",
    f"{OWN}, medusa": "the heads trained now",
}
BUSY = "Less is measured, since this machine is slow or busy now"
DRAFTING, TOTAL = "drafting:\n× plain decoding", "total:\n× transformers"
HOW_TO_READ = (
    "Tokens per step of the model: the acceptance length. Ratios: of whole answers, prefill "
    "included, with the 95 % interval over the prompts in brackets; none: the interval holds 1, so "
    "no difference was measurable."
)


def say(text: str = "") -> None:
    console.out.print(text, markup=False, highlight=False)


def heading(text: str) -> None:
    say()
    console.out.print(text, style="bold", markup=False, highlight=False)


def intro(work: Work, processor: str, threads: int, before: int) -> None:
    """Print what the demo does. `threads`: computed with; `before`: usually."""
    say(
        f"This demo runs {work.model} on this machine ({processor}; threads: {threads}), in at "
        f"most {_rounded(work.seconds)} minutes. A model gives one token a step. With drafting, "
        "small heads propose the next tokens, one step of the model checks them all, and those "
        "that the model would have chosen itself are kept: the same text in fewer steps."
    )
    if threads < before:
        say(
            f"Other programs keep this machine busy: one thread is faster than {before} now, so "
            "everything here computes with one."
        )


def part_one(work: Work) -> None:
    heading("1 of 2. The heads that come with the kit")
    say(
        f"The first {work.questions} prompts of {work.measured_prompts.name}, {work.new_tokens} "
        "new tokens each, greedy. The methods take turns on each prompt, so other work on this "
        "machine slows all of them alike."
    )


def smaller(work: Work, size: Size) -> None:
    """Print what the machine is too slow or busy for at the moment."""
    less = []
    if size.questions < work.questions:
        less.append(f"{size.questions} of {work.questions} prompts")
    if size.new_tokens < work.new_tokens:
        less.append(f"{size.new_tokens} of {work.new_tokens} new tokens")
    if not size.with_transformers:
        less.append("no transformers generate, which would take too long")
    if less:
        say(f"{BUSY}: {', '.join(less)}.")


def part_two(work: Work) -> None:
    heading("2 of 2. Heads trained on this machine")
    say(
        f"The model answers {work.answers} prompts. New heads learn from these answers in "
        f"{work.updates} updates; the model itself does not change. That is little text, so expect "
        "less of them than of the kit's heads."
    )


def first_table(comparison: Comparison, size: Size) -> None:
    """Print the first part's table; drafting's gain and the total are two columns."""
    ratios = {DRAFTING: ONE_NODE, **({TOTAL: TRANSFORMERS} if size.with_transformers else {})}
    _table(comparison, ratios)
    say(HOW_TO_READ)
    if comparison.result(TRANSFORMERS):
        say(
            "The last column is everything together. What plain decoding has in it comes from the "
            "kit's own code for a step, not from heads."
        )
    _short_of_prompts(comparison, size)


def second_table(comparison: Comparison, size: Size) -> None:
    _table(comparison, {DRAFTING: ONE_NODE})
    say(
        "Decoding verifies only as many draft tokens as are worth their cost on this machine, so "
        "its acceptance length is below that of the whole tree above."
    )
    _short_of_prompts(comparison, size)


def verdict(comparison: Comparison, name: str) -> None:
    say(gain(SUBJECTS[name], comparison.against(name, ONE_NODE)))


def gain(subject: str, interval: Interval | None) -> str:
    """A sentence on what drafting changed; no claim where the interval holds 1."""
    if interval is None:
        return f"With {subject}: too few prompts were measured for a ratio to plain decoding."
    if interval.holds_one:
        return (
            f"With {subject}: no measurable difference on this machine (95 % interval "
            f"{_range(interval)} × plain decoding)."
        )
    way = "faster" if interval.low > 1 else "slower"
    return (
        f"With {subject}: {way} than plain decoding on this machine, {interval.ratio:.2f} × its "
        f"speed (95 % interval {_range(interval)})."
    )


def tokens(comparison: Comparison) -> None:
    """Print how many answers are the same."""
    first = NAMES[comparison.report.ran[0].name]
    same = f"{comparison.identical} of {comparison.compared} answers"
    sentence = f"{same} are those of {first}, token for token"
    rounding = comparison.compared - comparison.identical - len(comparison.wrong)
    if rounding:
        sentence += f"; {rounding} differ by rounding where two tokens are nearly as likely"
    say(f"{sentence}.")


def trained(work: Work, files: DemoFiles, done: Trained, plotted: bool) -> None:
    if done.before:
        say(
            f"The heads that an earlier run trained are used; to train again, remove "
            f"{files.folder} and run `make demo` again."
        )
    say(f"Done: {done.answers} answers ({done.tokens:,} tokens), {done.updates} updates.")
    if missing := not_done(work, done):
        say(f"Not done within the time limit on this machine: {missing}. So the heads are worse "
            "than they would be with all of it.")  # fmt: skip
    say()
    if len(done.curve) < 2:
        say("There were too few held-out answers to compute an acceptance length.")
        return
    first, *later = done.curve
    say("Acceptance length while training, with a tree of 16 nodes, on held-out answers:")
    for line in curve.lines(done.curve):
        say(line)
    best = max(later, key=lambda point: point.acceptance_length)
    say(
        f"Before training: {first.acceptance_length:.2f} tokens per step. After {best.updates} "
        f"updates: {best.acceptance_length:.2f}."
    )
    if plotted:
        say(f"The same as a picture: {files.curve}")


def not_done(work: Work, done: Trained) -> str:
    """The work that was not done, in words; empty where all was."""
    missing = []
    if done.answers < work.answers:
        missing.append(f"{work.answers - done.answers} of {work.answers} answers")
    if done.updates < work.updates:
        missing.append(f"{work.updates - done.updates} of {work.updates} updates")
    return " and ".join(missing)


def cut_short(files: DemoFiles) -> None:
    """Print, in place of the second part's results, that there was no time for them."""
    say(
        "This machine was too slow or busy to finish these heads within the time limit, so there "
        f"is nothing to measure yet. The answers{_and_updates(files)} so far are kept in "
        f"{files.folder}; `make demo` resumes there."
    )


def _and_updates(files: DemoFiles) -> str:
    return " and updates" if (files.run / "checkpoint").is_dir() else ""


def closing(files: DemoFiles, seconds: float) -> None:
    heading("What to type next")
    own = (f"medusa-kit chat --heads {files.heads}", "chat with the heads trained now")
    again = ("make demo", "resume the training of these heads")
    commands = [
        (". .venv/bin/activate", "once in each terminal"),
        ("medusa-kit chat", "chat with the kit's heads"),
        own if (files.heads / "tree.json").is_file() else again,
        ("medusa-kit train --quick -m MODEL --prompts FILE --hours 2", "heads for your own model"),
    ]
    width = max(len(command) for command, _ in commands)
    for command, what in commands:
        line = f"  {command:<{width}}  # {what}"
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)
    say()
    console.note(f"{seconds / 60:.1f} minutes; everything the demo wrote is in {files.folder}")


def _table(comparison: Comparison, ratios: Mapping[str, str]) -> None:
    """Print a row for each method. `ratios`: columns, and the method that each is a ratio to."""
    rows = []
    for result in comparison.report.results:
        name = NAMES[result.name]
        if result.not_run is not None:
            rows.append((f"{name} (not run: {result.not_run})", *["–"] * (2 + len(ratios))))
            continue
        rows.append(
            (
                name,
                f"{result.total.tokens_per_second:.1f}",
                console.number(result.total.acceptance_length, ".2f"),
                *(_cell(comparison, result.name, reference) for reference in ratios.values()),
            )
        )
    columns = ("method", "tokens/s", "tokens\nper step", *ratios)
    console.out.print(console.table("", columns, rows))


def _cell(comparison: Comparison, name: str, reference: str) -> str:
    if name == TRANSFORMERS and reference == ONE_NODE:
        return "–"  # it is no drafting
    if name == reference:
        return "1"
    interval = comparison.against(name, reference)
    if interval is None:
        return "too few prompts"
    ratio = "none" if interval.holds_one else f"{interval.ratio:.2f}"
    return f"{ratio} ({interval.low:.2f}–{interval.high:.2f})"


def _range(interval: Interval) -> str:
    return f"{interval.low:.2f} to {interval.high:.2f}"


def _short_of_prompts(comparison: Comparison, size: Size) -> None:
    if comparison.report.num_prompts < size.questions:
        say(f"{BUSY}: {comparison.report.num_prompts} of {size.questions} prompts.")


def _rounded(seconds: float) -> int:
    return max(1, -(-int(seconds) // 60) + 1)
