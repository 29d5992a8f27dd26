"""What the demo prints: what is shown and why, tables, and what to type next."""

from collections.abc import Sequence

from medusa_kit import console
from medusa_kit.bench.interval import Interval
from medusa_kit.bench.methods import ONE_NODE, TRANSFORMERS
from medusa_kit.demo import curve
from medusa_kit.demo.comparison import Comparison
from medusa_kit.demo.own import Places, Trained
from medusa_kit.demo.work import Work

SHIPPED, OWN = "the kit's", "your"  # whose heads, as engines are named
NAMES = {
    TRANSFORMERS: "transformers generate",
    ONE_NODE: "plain decoding, no drafting",
    f"{SHIPPED}, medusa": "the kit's heads",
    f"{SHIPPED}, auto": "auto, the default: the kit's heads and earlier text",
    f"{OWN}, medusa": "the heads trained just now",
}
READ = (
    "Acceptance length is the number of tokens that one step of the model gives. A ratio is of whole "
    "answers, prefill included; in brackets is its 95 % interval over the prompts. Where that "
    "interval holds 1, no difference was measurable."
)


def say(text: str = "") -> None:
    console.out.print(text, markup=False, highlight=False)


def heading(text: str) -> None:
    say()
    console.out.print(text, style="bold", markup=False, highlight=False)


def intro(work: Work, where: str) -> None:
    say(
        f"This demo runs {work.model} on this machine ({where}), in at most "
        f"{_rounded(work.seconds)} minutes. A model gives one token a step. With drafting, small "
        "heads propose the next tokens, one step of the model checks them all, and those that the "
        "model would have chosen itself are kept: the same text in fewer steps."
    )


def part_one(work: Work) -> None:
    heading("1 of 2. The heads that come with the kit")
    say(
        f"{work.questions} prompts, {work.new_tokens} new tokens each, greedy. The methods take "
        "turns on each prompt, so other work on this machine slows all of them alike."
    )


def part_two(work: Work) -> None:
    heading("2 of 2. Heads trained on this machine")
    say(
        f"The model answers {work.answers} prompts. New heads learn from these answers in "
        f"{work.updates} updates; the model itself does not change. That is little text, so expect "
        "less of them than of the kit's heads."
    )


def first_table(found: Comparison) -> None:
    """Drafting's gain and the total are two columns."""
    columns = ("method", "tokens/s", "acceptance length", "drafting: ratio to plain decoding",
               "in total: ratio to transformers")  # fmt: skip
    _table(found, columns, (ONE_NODE, TRANSFORMERS))
    say(READ)
    say(
        "The last column is drafting and everything else together. What plain decoding has there "
        "comes from the kit's own code for a step, not from heads."
    )
    _short_of_prompts(found)


def second_table(found: Comparison) -> None:
    columns = ("method", "tokens/s", "acceptance length", "drafting: ratio to plain decoding")
    _table(found, columns, (ONE_NODE,))
    _short_of_prompts(found)


def verdict(found: Comparison, name: str) -> None:
    say(f"{NAMES[name].capitalize()}: {gain(found.against(name, ONE_NODE))}.")


def gain(interval: Interval | None) -> str:
    """One sentence's worth; no claim where the interval holds 1."""
    if interval is None:
        return "too few prompts were measured to say whether drafting makes decoding faster"
    if interval.holds_one:
        return f"no measurable difference on this machine ({_range(interval)} × plain decoding)"
    way = "faster" if interval.low > 1 else "slower"
    return (
        f"{way} than plain decoding on this machine, {interval.ratio:.2f} × "
        f"({_range(interval)}) as fast"
    )


def tokens(found: Comparison) -> None:
    """Whether the answers are the same."""
    first = NAMES[found.report.ran[0].name]
    said = f"{found.identical} of {found.compared} answers are those of {first}, token for token"
    rounding = found.compared - found.identical - len(found.wrong)
    if rounding:
        said += f"; {rounding} differ by rounding where two tokens are nearly as likely"
    say(f"{said}.")


def trained(work: Work, places: Places, done: Trained, plotted: bool) -> None:
    if done.before:
        say(
            f"The heads that an earlier run trained are used; to train again, remove "
            f"{places.folder} and run `make demo` again."
        )
    say(f"Done: {done.answers} answers ({done.tokens:,} tokens), {done.updates} updates.")
    if missing := not_done(work, done):
        say(f"Not done within the time limit on this machine: {missing}. So the heads are worse "
            "than they would be with all of it.")  # fmt: skip
    say()
    if done.curve:
        rows = curve.bars(done.curve)
        say("Acceptance length while training, with a tree of 16 nodes, on held-out answers:")
        console.out.print(console.table("", ("updates", "acceptance length", ""), rows))
        first, best = done.curve[0], max(done.curve, key=lambda point: point.acceptance_length)
        say(f"Before training: {first.acceptance_length:.2f} tokens per step. After "
            f"{best.updates} updates: {best.acceptance_length:.2f}.")  # fmt: skip
    else:
        say("There were too few held-out answers to compute an acceptance length.")
    if plotted:
        say(f"The same as a picture: {places.curve}")
    say()


def not_done(work: Work, done: Trained) -> str:
    """What is missing of the work; empty where nothing is."""
    missing = []
    if done.answers < work.answers:
        missing.append(f"{work.answers - done.answers} of {work.answers} answers")
    if done.updates < work.updates:
        missing.append(f"{work.updates - done.updates} of {work.updates} updates")
    return " and ".join(missing)


def closing(work: Work, places: Places, seconds: float) -> None:
    heading("What to type next")
    commands = [
        (". .venv/bin/activate", "once in each terminal"),
        ("medusa-kit chat", "chat with the kit's heads"),
        (f"medusa-kit chat --heads {places.heads}", "chat with the heads trained just now"),
        ("medusa-kit train --quick -m MODEL --prompts FILE --hours 2", "heads for your own model"),
    ]
    width = max(len(command) for command, _ in commands)
    for command, what in commands:
        line = f"  {command:<{width}}  # {what}"
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)
    say()
    console.note(f"{seconds / 60:.1f} minutes; everything the demo wrote is in {places.folder}")


def _table(found: Comparison, columns: Sequence[str], references: Sequence[str]) -> None:
    rows = []
    for result in found.report.results:
        name = NAMES[result.name]
        if result.not_run is not None:
            rows.append((f"{name} (not run: {result.not_run})", *["–"] * (len(columns) - 1)))
            continue
        length = result.total.acceptance_length
        ratios = [_cell(found, result.name, reference) for reference in references]
        speed = f"{result.total.tokens_per_second:.1f}"
        rows.append((name, speed, console.number(length, ".2f"), *ratios))
    console.out.print(console.table("", columns, rows))


def _cell(found: Comparison, name: str, reference: str) -> str:
    if name == TRANSFORMERS and reference == ONE_NODE:
        return "–"  # it is no drafting
    if name == reference:
        return "1"
    interval = found.against(name, reference)
    if interval is None:
        return "too few prompts"
    if interval.holds_one:
        return f"none measurable ({_range(interval)})"
    return f"{interval.ratio:.2f} × ({_range(interval)})"


def _range(interval: Interval) -> str:
    return f"{interval.low:.2f} to {interval.high:.2f}"


def _short_of_prompts(found: Comparison) -> None:
    if found.report.num_prompts < found.asked:
        say(f"This machine was too slow or busy for all: {found.report.num_prompts} of "
            f"{found.asked} prompts were measured within the time limit.")  # fmt: skip


def _rounded(seconds: float) -> int:
    return max(1, -(-int(seconds) // 60) + 1)
