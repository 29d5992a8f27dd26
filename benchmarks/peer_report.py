"""Tables of peer_tasks.py: each task's speeds and ratios, from everybody's answers."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llama_tools import NAME as PLAIN

from medusa_kit import console
from medusa_kit.bench.interval import interval_of
from medusa_kit.loops import loop_start

DECODING, WHOLE = "decoding only", "with the reading of the prompt"


class Answer(NamedTuple):
    method: str
    round: int
    prompt: int
    category: str
    first_seconds: float  # until the first token
    seconds: float  # after it
    ids: list[int]
    cached: int  # tokens of the prompt that were there from the one before


def counted(answers: Sequence[Answer]) -> list[Answer]:
    """Without the prompts and rounds in which somebody's answer ends in a loop."""
    looped = {(one.round, one.prompt) for one in answers if loop_start(one.ids) is not None}
    return [one for one in answers if (one.round, one.prompt) not in looped and len(one.ids) > 1]


def speed(answers: Sequence[Answer], name: str, what: str) -> float:
    own = [one for one in answers if one.method == name]
    if what == DECODING:
        return sum(len(one.ids) - 1 for one in own) / sum(one.seconds for one in own)
    return sum(len(one.ids) for one in own) / sum(one.first_seconds + one.seconds for one in own)


def ratio(answers: Sequence[Answer], name: str, to: str, what: str) -> str:
    """Of all tokens and seconds, then a prompt's with its interval."""
    by_prompt: dict[int, list[Answer]] = {}
    for one in answers:
        by_prompt.setdefault(one.prompt, []).append(one)
    whole = speed(answers, name, what) / speed(answers, to, what)
    found = interval_of(
        [speed(own, name, what) / speed(own, to, what) for own in by_prompt.values()]
    )
    if found is None:
        return f"{whole:.2f}"
    return f"{whole:.2f}; {found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


def by_task(answers: Sequence[Answer]) -> Iterator[tuple[str, list[Answer]]]:
    for category in ["all", *dict.fromkeys(one.category for one in answers)]:
        yield category, [one for one in answers if category in ("all", one.category)]


def against_plain(answers: Sequence[Answer], names: Sequence[str], what: str) -> str:
    cells = [
        [task, str(len({one.prompt for one in own})), f"{speed(own, PLAIN, what):.1f}",
         *(ratio(own, name, PLAIN, what) for name in names if name != PLAIN)]
        for task, own in by_task(answers)
    ]  # fmt: skip
    others = [name for name in names if name != PLAIN]
    return console.markdown(["task", "prompts", f"{PLAIN}, tokens/s", *others], cells)


def against_best(answers: Sequence[Answer], names: Sequence[str], what: str) -> str:
    ours = [name for name in names if not name.startswith(PLAIN)]
    cells = []
    for task, own in by_task(answers):
        theirs = [name for name in names if name.startswith(PLAIN)]
        best = max(theirs, key=lambda name: speed(own, name, what))
        row = [task, best, f"{speed(own, best, what):.1f}"]
        cells.append([*row, *(ratio(own, name, best, what) for name in ours)])
    return console.markdown(["task", "llama.cpp's best", "tokens/s", *ours], cells)


def same_answers(answers: Sequence[Answer], names: Sequence[str]) -> str:
    """How many answers with drafts are those of the same program and precision without."""
    told = []
    for name in names:
        kind = name.split(", ")[0]
        plain = kind if kind == PLAIN else f"{kind}, plain"
        texts = {(one.round, one.prompt): one.ids for one in answers if one.method == plain}
        own = [one for one in answers if one.method == name and name != plain and texts]
        if own:
            same = sum(one.ids == texts[one.round, one.prompt] for one in own)
            told.append(f"{name}: {same} of {len(own)}")
    return "; ".join(told)


def report(answers: Sequence[Answer]) -> str:
    """Of the prompts and rounds that everybody answered."""
    names, left = list(dict.fromkeys(sorted(one.method for one in answers))), counted(answers)
    names.sort(key=lambda name: not name.startswith(PLAIN))
    tables = [
        f"{what}\n\n{against_plain(left, names, what)}\n\n{against_best(left, names, what)}"
        for what in (DECODING, WHOLE)
    ]
    prompts = {(one.round, one.prompt) for one in answers}
    kept = {(one.round, one.prompt) for one in left}
    loops = f"{len(prompts)} prompts in {1 + max(one.round for one in answers)} rounds"
    loops += f", {len(prompts - kept)} left out for a loop or an answer of one token"
    return "\n\n".join([*tables, loops, f"same as plain: {same_answers(answers, names)}"])
