"""`train --quick --dry-run`: whether prompts and hours are enough, in a few lines. Writes nothing.

A few prompts are answered and a few updates run, as a run begins; the rest is arithmetic.
"""

import itertools
import math
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from medusa_kit import console
from medusa_kit.data.readers import AnswerRow
from medusa_kit.quick import plan, report, settings, trial
from medusa_kit.quick.answered import keep_copy
from medusa_kit.quick.answers import Written, activations_for, answer, read_answers
from medusa_kit.quick.plan import Rates, minutes
from medusa_kit.quick.run import show_plan
from medusa_kit.quick.session import Session
from medusa_kit.quick.state import State
from medusa_kit.quick.text import check_useful, probe
from medusa_kit.train.forecast.described import has_weights
from medusa_kit.train.forecast.machine import peak_bytes
from medusa_kit.train.needs import size

ANSWERS, MIN_ANSWERS, SECONDS = 24, 4, 15.0  # prompts that are answered, in so many seconds, about
# docs/training.md, "What to expect": (training tokens, acceptance length of static trees of 4
# nodes) of recurrent heads for SmolLM2-135M-Instruct.
MEASURED = ((100_707, 1.602), (305_403, 1.696), (981_782, 1.773), (2_118_274, 1.823))
# Of heads that go on from shipped ones, on text that those draft token poorly: (training tokens,
# acceptance length before, after).
GOING_ON = (20_441, 1.25, 1.39)
ANYWAY = "; a run works all the same, with less gain"
OF = "measured with SmolLM2-135M-Instruct, recurrent heads and a tree of 4 nodes"


def forecast(session: Session) -> str:
    """The plan goes to stderr, as in a run; the verdict is returned. Raises what a run raises
    before it trains, such as MedusaKitError where the hours are too few for any heads."""
    console.note(report.engines(session.request.engine))
    show_plan(session)
    if not has_weights(session.request.model, None):
        return _without_weights(session)
    with tempfile.TemporaryDirectory() as folder:
        request = replace(session.request, output=Path(folder))
        state = State(request.output, request.settings(session.prompts), request.clock)
        state.open(fresh=False)
        tried = replace(session, request=request, state=state)
        if session.prompts.answered:
            keep_copy(request.prompts, tried.copy)
        rates = _measured(tried)
        memory = peak_bytes(tried.base.device)
        row_bytes = 2.0 * tried.base.info.hidden_size * rates.row_tokens
    return "\n".join(lines_of(session, fitted(session, rates), memory, row_bytes))


def already_there(session: Session) -> str | None:
    """What a run would go on with, where the folder has some of it."""
    state, folder = session.state, session.request.output
    if not state.path.is_file():
        return None
    if state.finished:
        return (
            f"{folder} has a finished run of this: without --dry-run its report is shown again; "
            "--fresh starts over"
        )
    return f"{folder} has a part of this run: without --dry-run it is resumed"


def _without_weights(session: Session) -> str:
    most = len(session.prompts.training) * settings.ANSWER_TOKENS
    tokens = session.prompts.answer_tokens or most
    return (
        f"the weights of {session.request.model} are not on this machine, so nothing is measured\n"
        f"text        at most {tokens:,} tokens of answers\n"
        f"acceptance  {expected_acceptance(tokens)}"
    )


def _measured(session: Session) -> Rates:
    """Rates of this machine. Training prompts are answered in the precision that a run takes."""
    recipe = settings.recipe_for(
        session.base, session.request.output, session.request.engine, earlier=session.earlier
    )
    rows, rate = _answers(session)
    base = session.base_in(recipe.base.dtype)
    expected = session.prompts.answer_tokens or 100_000.0
    return trial.measure(base, rows, recipe, rate, expected, session.clock, brief=True)


def _answers(session: Session) -> tuple[list[AnswerRow], float]:
    """(a few answers, tokens of answers a second)."""
    prompts = session.prompts
    if prompts.answered:
        answered = [row for row in prompts.calibration if isinstance(row, AnswerRow)]
        return answered[:ANSWERS], plan.ANSWERED
    activations = activations_for(session.base, session.answers)
    rate = probe(session, activations)
    count = max(MIN_ANSWERS, min(ANSWERS, int(SECONDS * rate / settings.ANSWER_TOKENS)))

    def once(written: Written) -> int:
        return 0 if written.num_prompts else count

    rows = prompts.training[: 4 * count]  # some may leave no room for an answer
    written = answer(session.base, rows, session.answers, once, session.clock, activations)
    return read_answers(session.answers), written.rate or rate


@dataclass(frozen=True)
class Fit:
    """What fits into the time, by measured rates."""

    rates: Rates
    answered: float  # prompts
    positions: float  # tokens of their answers
    epochs: float

    @property
    def tokens(self) -> float:
        """Training tokens, those of prompts included."""
        return self.positions * self.rates.trained

    @property
    def answering(self) -> float:
        return self.positions / self.rates.answers

    @property
    def training(self) -> float:
        return self.rates.training(self.positions, self.epochs)


def fitted(session: Session, rates: Rates) -> Fit:
    """Raises MedusaKitError where too little text for any heads fits into the time."""
    prompts, total = session.prompts, session.total
    seconds = total - plan.reserved(total)
    seconds -= 0.0 if prompts.answered else plan.share("held_out", total)
    check_useful(session, max(0.0, seconds), plan.positions_for(1.0, rates))
    most = prompts.answer_tokens or len(prompts.training) * rates.answer_length
    positions = min(most, plan.positions_for(seconds, rates))
    left = seconds - positions / rates.answers
    epochs = min(settings.MAX_EPOCHS, plan.epochs_for(left, positions, rates))
    return Fit(rates, positions / rates.answer_length, positions, max(1.0, epochs))


def expected_acceptance(tokens: float) -> str:
    """By the measured curve, a straight line between its points over the logarithm of text."""
    (fewest, lowest), (most, highest) = MEASURED[0], MEASURED[-1]
    if tokens < fewest:
        return f"below {lowest:.2f} tokens a step, as {fewest:,} training tokens gave; {OF}"
    if tokens > most:
        return f"above {highest:.2f} tokens a step, as {most:,} training tokens gave; {OF}"
    fewer, more = next(pair for pair in itertools.pairwise(MEASURED) if tokens <= pair[1][0])
    share = math.log(tokens / fewer[0]) / math.log(more[0] / fewer[0])
    length = fewer[1] + (more[1] - fewer[1]) * share
    return f"about {length:.2f} tokens a step; {OF}"


def _acceptance(session: Session, tokens: float) -> str:
    if session.earlier is None:
        return expected_acceptance(tokens)
    fewest, before, after = GOING_ON
    return (
        f"continues from {session.earlier}; on text of another kind {fewest:,} training tokens "
        f"raised {before:.2f} tokens a step to {after:.2f}; {OF}"
    )


def lines_of(session: Session, fit: Fit, memory: float, row_bytes: float) -> list[str]:
    prompts, total = session.prompts, session.total
    held_out = 0.0 if prompts.answered else min(
        plan.share("held_out", total),
        len(prompts.calibration) * fit.rates.answer_length / fit.rates.answers)  # fmt: skip
    last = plan.reserved(total)
    whole = held_out + fit.answering + fit.training + last
    answers = "" if prompts.answered else f"answers {minutes(held_out + fit.answering)}, "
    disk = fit.positions * row_bytes
    free = shutil.disk_usage(_existing(session.request.output)).free
    return [
        f"text        {min(fit.answered, len(prompts.training)):,.0f} of "
        f"{len(prompts.training):,} prompts, answers of "
        f"{fit.rates.answer_length:,.0f} tokens: about {fit.tokens:,.0f} training tokens, those "
        "of prompts included",
        f"time        about {minutes(whole)} of {minutes(total)}: {answers}training "
        f"{minutes(fit.training)} ({fit.epochs:.1f} epochs), tree, verify and bench at most "
        f"{minutes(last)}",
        f"memory      about {size(memory)}, and {size(disk)} of hidden states on disk "
        f"({size(free)} free)",
        f"acceptance  {_acceptance(session, fit.tokens)}",
        f"verdict     {verdict(session, fit)}",
    ]


def verdict(session: Session, fit: Fit) -> str:
    """Whether the text is as much as the least that was measured, and what would give more."""
    fewest = MEASURED[0][0] if session.earlier is None else GOING_ON[0]
    a_prompt = fit.tokens / max(fit.answered, 1e-9)
    prompts = len(session.prompts.training)
    if fit.tokens >= fewest:
        return "enough" + _more(session, fit)
    if prompts * a_prompt >= fewest:
        needed = fewest / fit.rates.trained
        seconds = needed / fit.rates.answers + fit.rates.training(needed, settings.EPOCHS)
        hours = plan.hours_for(seconds, plan.share("held_out", session.total))
        return (
            f"too little time: {fewest:,} training tokens take --hours "
            f"{plan.rounded_up(hours)}{ANYWAY}"
        )
    kept = prompts / (prompts + len(session.prompts.calibration) + len(session.prompts.test))
    needed = math.ceil(fewest / a_prompt / kept / 10) * 10
    return f"too little text: about {needed:,} prompts give {fewest:,} training tokens{ANYWAY}"


def _more(session: Session, fit: Fit) -> str:
    """What ends first, prompts or time."""
    prompts = len(session.prompts.training)
    if fit.answered < 0.95 * prompts:
        return f"; more --hours would use the other {prompts - fit.answered:,.0f} prompts"
    return "; more prompts would use the time that is left" if _time_left(session, fit) else ""


def _time_left(session: Session, fit: Fit) -> bool:
    spent = fit.answering + fit.training + plan.reserved(session.total)
    return spent < 0.8 * session.total


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.exists())
