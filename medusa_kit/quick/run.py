"""A quick run: phases one after the other, each recorded when it is finished.

held_out   answers to held-out prompts; rates are measured           text.py
answers    answers to train on                                       text.py
training   hidden states and updates                                 training.py
search     calibration, and the tree that suits the machine          search.py
verify     token by token against transformers                       judging.py
bench      heads, `auto`, plain decoding, transformers               judging.py

The same call resumes wherever an earlier one stopped.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.heads.checkpoint import stored_digest
from medusa_kit.paths import expanded
from medusa_kit.quick import plan, report, settings
from medusa_kit.quick.answered import keep_copy, read_answered
from medusa_kit.quick.judging import Judge, run_bench, run_verify
from medusa_kit.quick.plan import minutes
from medusa_kit.quick.prompts import Prompts, read_prompts
from medusa_kit.quick.search import run_search
from medusa_kit.quick.session import Request, Session
from medusa_kit.quick.state import PHASES, State, begun_earlier
from medusa_kit.quick.text import run_answers, run_held_out
from medusa_kit.quick.training import run_training
from medusa_kit.train.run.lock import only_training_in

Phase = Callable[[Session], dict[str, Any]]


def prepared(request: Request, fresh: bool = False) -> Session:
    """Everything that can be checked before a model is loaded. Writes nothing.

    Raises ConfigError (a folder in use by other work, no time), DataError (prompts).
    """
    if not request.hours > 0 or request.hours == float("inf"):
        raise ConfigError(f"hours {request.hours:g} are out of range; expected a number above 0")
    prompts = _prompts_of(request, fresh)
    state = State(request.output, request.settings(prompts), request.clock)
    if fresh:
        state.check_own()
    if not (fresh and state.path.is_file()):
        state.check()
    return Session(request, prompts, state)


def _prompts_of(request: Request, fresh: bool) -> Prompts:
    earlier = not fresh and begun_earlier(request.output)
    if not request.answered:
        return read_prompts(request.prompts, earlier)
    copy = request.output / settings.COPY
    taken = copy.is_file() and not fresh
    return read_answered(copy if taken else expanded(request.prompts), request.prompts, earlier)


def run(session: Session, fresh: bool = False) -> dict[str, Any]:
    """All phases that are not done yet; returns verify's figures. Raises what phases raise."""
    console.note(report.engines(session.request.engine))  # before all else that is reported
    judge = Judge(session)
    phases: dict[str, Phase] = {
        "held_out": run_held_out,
        "answers": run_answers,
        "training": run_training,
        "search": run_search,
        "verify": lambda session: run_verify(session, judge),
        "bench": lambda session: run_bench(session, judge),
    }
    state = session.state
    changed = not fresh and state.of_other_heads(stored_digest(session.heads))
    if (
        not fresh and state.finished and not changed
    ):  # the folder may be one that cannot be written to
        state.open(fresh)
        _ = session.base  # its report is of the base that is there now, or it is refused
        show_plan(session)
        return state.figures("verify")
    with _locked(session.request.output):
        state.open(fresh, changed)
        if session.prompts.answered and not session.copy.is_file():
            keep_copy(session.request.prompts, session.copy)
            session.prompts = read_answered(
                session.copy, session.request.prompts, session.prompts.earlier
            )
        try:
            show_plan(session)
            for number, name in enumerate(PHASES, start=1):
                if state.done(name):
                    continue
                console.note(f"{number} of {len(PHASES)}, {report.NAMES[name]}:")
                with state.phase(name) as figures:
                    figures |= phases[name](session)
        finally:
            state.save(running=False)
    return state.figures("verify")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the folder. Raises ConfigError while another run works in it, MedusaKitError where it
    cannot be written to."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(only_training_in(folder))
        except OSError as error:
            raise MedusaKitError(
                f"cannot write to {folder}: {error.strerror}",
                hint="name another folder with --output",
            ) from error
        yield


def show_plan(session: Session) -> None:
    """Notes on the prompts and the plan, before anything is loaded."""
    total, prompts = session.total, session.prompts
    if prompts.skipped:
        console.warn(
            f"{prompts.skipped} rows of {prompts.source} are no prompts and are left out "
            f"({prompts.first_skipped})"
        )
    if prompts.repeated:
        console.note(f"{prompts.repeated} rows ask what another one asks and are left out")
    if done := [report.NAMES[name] for name in PHASES if session.state.done(name)]:
        spent = minutes(session.state.seconds())
        console.note(f"resuming after {spent} of {minutes(total)}; done: {', '.join(done)}")
        return
    last = ", ".join(f"{report.NAMES[name]} {minutes(plan.share(name, total))}"
                     for name in plan.LAST)  # fmt: skip
    remaining = total - plan.reserved(total) - plan.share("held_out", total)
    console.note(
        f"prompts: {len(prompts.training):,} to train on, {len(prompts.calibration):,} for the "
        f"tree, {len(prompts.test):,} to verify and measure with"
    )
    console.note(
        f"plan for {minutes(total)}: held-out answers {minutes(plan.share('held_out', total))}, "
        f"answers and training {minutes(remaining)} (divided once rates are measured), {last}"
    )
