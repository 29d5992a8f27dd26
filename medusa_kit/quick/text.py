"""The first two phases: answers to held-out prompts, by which rates are measured, then answers to
train on."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from medusa_kit import console
from medusa_kit.data.answer_settings import ACTIVATIONS
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import DataError, MedusaKitError
from medusa_kit.loops import loop_start, too_many
from medusa_kit.quick import plan, settings, trial
from medusa_kit.quick.answered import take
from medusa_kit.quick.answers import Written, activations_for, answer, read_answers
from medusa_kit.quick.plan import MIN_POSITIONS, Rates, minutes
from medusa_kit.quick.session import Session, encoded
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.train.features.cache import SPARE_BYTES
from medusa_kit.tuning import calibrate

MIN_ANSWERS = 4  # in a first round, whatever they take
MIN_HELD_OUT = 2  # a tree is found on some and judged on others
PROBE_PROMPTS, PROBE_TOKENS = 2, 9
MANY_PROMPTS = 8  # as a batch of them shows how much faster a precision is
CHANGED = 0.15  # of the planned positions: said if it is more
SPARE_DISK = 1 << 30


def run_held_out(session: Session) -> dict[str, Any]:
    """Answers to the prompts for calibration, then the rates of everything up to the search."""
    if session.prompts.answered:
        return _take_held_out(session)
    before = session.state.phase_seconds("held_out")
    probed = probe(session) if session.state.recall("rates") is None else 0.0
    began = session.clock()  # the base is loaded

    def more(written: Written) -> int:
        used = before + session.clock() - began
        rate = written.rate or probed  # 0: nobody knows yet, a first round will tell
        possible = (plan.share("held_out", session.total) - used) * rate / written.length
        first = written.num_prompts == 0
        count = plan.round_of(possible, settings.ANSWER_BATCH, first)
        return max(count, MIN_ANSWERS) if first else count

    written = answer(
        session.base, session.prompts.calibration, session.held_out, more, session.clock
    )
    _check_enough(session)
    if session.state.recall("rates") is None:
        rates = _measured(session, (written.rate or probed) * _faster(session))
        session.state.note("rates", rates.as_dict())
    return {"answers": written.answers, "tokens": written.tokens}


def _take_held_out(session: Session) -> dict[str, Any]:
    """The same where answers are there already."""
    _ = session.base  # which is the one that gave them
    written = take(session.copy, session.prompts.calibration, session.held_out)
    _check_enough(session)
    if session.state.recall("rates") is None:
        session.state.note("rates", _measured(session, plan.ANSWERED).as_dict())
    return {"answers": written.answers, "tokens": written.tokens}


def _check_enough(session: Session) -> None:
    """Raises DataError where no tree could be found on the held-out answers."""
    usable = calibrate.usable_answers(session.base, read_answers(session.held_out))
    if len(usable) < MIN_HELD_OUT:
        raise DataError(
            f"{len(usable)} of {len(session.prompts.calibration)} held-out prompts gave an answer; "
            f"the search for a tree needs {MIN_HELD_OUT} or more",
            hint="give more prompts, or prompts that leave more room for answers",
        )


def probe(session: Session, activations: str = FLOAT32) -> float:
    """Tokens a second of a few tokens; 0 where none came. Raises MedusaKitError where all the time
    would not do."""
    prompts = encoded(session.plain, session.prompts.training, PROBE_TOKENS, PROBE_PROMPTS)
    rate = _rate(session.answering_in(activations), prompts)
    if rate:
        best = rate * settings.ANSWER_BATCH / len(prompts)  # if a step of many took no longer
        check_useful(session, max(0.0, session.remaining), best)
    return rate


def _rate(engine: Engine, prompts: Sequence[list[int]]) -> float:
    if not prompts:
        return 0.0
    results = engine.generate(prompts, max_new_tokens=PROBE_TOKENS, drafter="none")
    seconds = max(result.stats.seconds - result.stats.first_token_seconds for result in results)
    return sum(len(result.token_ids) - 1 for result in results) / max(seconds, 1e-6)


def _faster(session: Session) -> float:
    """How many times as fast training prompts are answered, in their precision, as those held out,
    which are answered in float32."""
    activations = activations_for(session.base, session.answers)
    if activations == FLOAT32:
        return 1.0
    prompts = encoded(session.plain, session.prompts.training, PROBE_TOKENS, MANY_PROMPTS)
    as_held_out = _rate(session.plain, prompts)
    return _rate(session.answering_in(activations), prompts) / as_held_out if as_held_out else 1.0


def _measured(session: Session, answer_rate: float) -> Rates:
    longest = session.prompts.answer_tokens or (
        len(session.prompts.training) * settings.ANSWER_TOKENS
    )
    expected = min(longest, session.remaining * answer_rate / 2)
    rates = _trial(session, answer_rate, expected)
    seconds = session.remaining - plan.reserved(session.total)
    possible = plan.positions_for(seconds, rates)
    check_useful(session, max(0.0, seconds), plan.positions_for(1.0, rates))
    positions = min(possible, session.prompts.answer_tokens or (
        len(session.prompts.training) * rates.answer_length))  # fmt: skip
    epochs = min(settings.EPOCHS, plan.epochs_for(
        seconds - positions / rates.answers, positions, rates))  # fmt: skip
    answered = session.prompts.answered
    at = "" if answered else f"{rates.answers:,.0f} tokens/s answered, "
    spent = "" if answered else f"answers for {minutes(positions / rates.answers)}, about "
    console.note(
        f"measured: {at}{rates.features:,.0f} tokens/s read for hidden states, "
        f"{rates.updates:,.0f} training tokens/s"
    )
    console.note(
        f"so: {spent}{positions:,.0f} training tokens; training for "
        f"{minutes(rates.training(positions, epochs))}"
    )
    return rates


def _trial(session: Session, answer_rate: float, expected: float) -> Rates:
    rows = read_answers(session.held_out)
    recipe = settings.recipe_for(
        session.base, session.request.output, session.request.engine, earlier=session.earlier
    )
    base = session.base_in(recipe.base.dtype)
    return trial.measure(base, rows, recipe, answer_rate, expected, session.clock)


def run_answers(session: Session) -> dict[str, Any]:
    """Answers to train on, until their share of the time or the prompts are used up."""
    if session.prompts.answered:
        return _take_answers(session)
    more = _Enough(session)
    activations = activations_for(session.base, session.answers)
    if activations != FLOAT32:
        console.note(
            f"training prompts are answered with {activations} activations, which is faster"
        )
    written = answer(
        session.base, session.prompts.training, session.answers, more, session.clock, activations
    )
    rates = replace(more.rates, answers=written.rate or more.rates.answers)
    session.state.note("rates", rates.as_dict())
    prompts = len(session.prompts.training)
    if written.num_prompts >= prompts:
        console.note(f"all {prompts:,} prompts are answered")
    return {"answers": written.answers, "tokens": written.tokens, "prompts": prompts,
            ACTIVATIONS: activations, "loops": _count_loops(session)}  # fmt: skip


def _take_answers(session: Session) -> dict[str, Any]:
    """The same where answers are there already: as many as the disk has room for."""
    room, rows = _room_on_disk(session, session.rates), session.prompts.training
    written = take(session.copy, rows, session.answers, room)
    if written.answers < len(rows):
        console.warn(
            f"the disk has room for the hidden states of {room:,.0f} training tokens; "
            f"{len(rows) - written.answers:,} answers are left out"
        )
    return {"answers": written.answers, "tokens": written.tokens, "prompts": len(rows),
            "loops": _count_loops(session)}  # fmt: skip


def _count_loops(session: Session) -> int:
    """How many answers to train on end in a loop; a warning where many do."""
    rows = read_answers(session.answers)
    loops = sum(loop_start(row.response_ids) is not None for row in rows)
    if (many := too_many(loops, len(rows))) is not None:
        console.warn(many)
    return loops


class _Enough:
    """How many prompts to answer next, so that there is time to train on all that is written."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.rates = session.rates
        self.room = _room_on_disk(session, self.rates)
        self.reported: float | None = None  # positions, as last said
        self.measured_again = self.warned_of_disk = False

    def __call__(self, written: Written) -> int:
        if count := self._count(written):
            return count
        if not self.measured_again:  # the machine may have been busy with something else
            self.measured_again = True
            self.rates = _trial(self.session, self.rates.answers, written.tokens)
            return self._count(written)
        return 0

    def _count(self, written: Written) -> int:
        rates = replace(self.rates, answers=written.rate or self.rates.answers)
        seconds = self.session.remaining - plan.reserved(self.session.total)
        positions = plan.positions_for(seconds, rates, written.tokens)
        if self.room < positions and not self.warned_of_disk:
            self.warned_of_disk = True
            console.warn(
                f"the disk has room for the hidden states of {self.room:,.0f} training tokens; "
                f"there is time for {positions:,.0f}"
            )
        positions = min(self.room, positions)
        self._report(min(positions, len(self.session.prompts.training) * written.length), rates)
        possible, first = (positions - written.tokens) / written.length, written.num_prompts == 0
        count = plan.round_of(possible, settings.ANSWER_BATCH, first)
        return max(count, MIN_ANSWERS) if first else count

    def _report(self, positions: float, rates: Rates) -> None:
        if self.reported is not None and abs(positions - self.reported) <= CHANGED * self.reported:
            return
        if self.reported is not None:
            console.note(
                f"{rates.answers:,.0f} tokens/s answered and {rates.updates:,.0f} training "
                f"tokens/s now: about {positions:,.0f} training tokens, not {self.reported:,.0f}"
            )
        self.reported = positions


def _room_on_disk(session: Session, rates: Rates) -> float:
    """Positions whose hidden states the disk has room for. Raises MedusaKitError for too few."""
    position_bytes = 2 * session.base.info.hidden_size * rates.row_tokens
    free = shutil.disk_usage(session.request.output).free
    min_bytes = MIN_POSITIONS * position_bytes + SPARE_BYTES
    if free < min_bytes:
        raise MedusaKitError(
            f"{session.request.output} has {free / 1e6:,.0f} MB free; expected "
            f"{min_bytes / 1e6:,.0f} or more, for hidden states",
            hint="make room and run the same command again, or name another folder with --output",
        )
    return max(float(MIN_POSITIONS), (free - SPARE_DISK) / position_bytes)


def check_useful(session: Session, seconds: float, rate: float) -> None:
    """Raises MedusaKitError where fewer positions than heads need fit into `seconds`; `rate`:
    positions a second."""
    possible = seconds * rate
    all_positions = session.prompts.answer_tokens or (
        len(session.prompts.training) * settings.ANSWER_TOKENS / 4
    )
    needed = min(float(MIN_POSITIONS), all_positions)
    if possible >= needed:
        return
    hours = plan.hours_for(needed / rate, session.total - session.remaining)
    raise MedusaKitError(
        f"{session.request.model} is too slow here for {session.request.hours:g} hours: about "
        f"{possible:,.0f} training tokens would fit; heads need {needed:,.0f} or more",
        hint=f"give more time: --hours {plan.rounded_up(hours)} or more",
    )
