"""Before an answer begins: whether the model is what it was, and what was made of it anew if not.

There is one promise for every runner. An answer is that of the model as it is when the answer
begins. Where the model changes while an answer is under way, that answer ends in an error.
"""

from typing import Any

from medusa_kit.base.model_state import watch_of
from medusa_kit.base.still import while_still
from medusa_kit.errors import IncompatibleBaseError, ModelChangedError
from medusa_kit.infer.self_check import TreeCheck, check_trees
from medusa_kit.infer.verifier import Verifier

State = tuple[Any, ...] | None  # of a model; None: nothing can be said


def up_to_date(verifier: Verifier, check: bool = True) -> int:
    """Look at the model, and make anew what was made of it if it has changed: packed weights,
    captured forwards, the self-check. Returns how often it has changed (`BaseModel.changes`).
    `check`: whether trees must be verified rightly on it; drafts may be wrong.

    Raises IncompatibleBaseError where it does not run any more or trees cannot be verified on it,
    ConfigError where its options cannot be kept, ModelChangedError where it goes on changing.
    """
    base = verifier.base
    number = base.look()
    if not number == base.number == verifier.number:
        while_still(lambda: base.look(), lambda: _renew(verifier, check), number)
    verifier.keep_attention()
    return verifier.number


def _renew(verifier: Verifier, check: bool) -> None:
    number = verifier.base.changes()
    with verifier.lock():
        if verifier.plain is not verifier:
            up_to_date(verifier.plain)
        verifier.renew()
        if check and verifier.plain is verifier:
            tolerance = _checked(verifier).rounding_tolerance
            verifier.rounding_tolerance = max(verifier.rounding_tolerance, tolerance)
        verifier.number = number


def _checked(verifier: Verifier) -> TreeCheck:
    try:
        return check_trees(verifier)
    except IncompatibleBaseError as error:
        if not verifier.reads_packed_weights:
            raise
        verifier.run_by_torch(error.message)
        return check_trees(verifier)


def state_of(verifier: Verifier) -> State:
    """What is equal as long as keys and values hold that a verifier has computed, as of the last
    look at its model, whatever autocast it was under. One that is not up to date has the state of
    one that is: what it computed before does not hold."""
    base = verifier.base
    if verifier.reads_packed_weights:
        return (base.number,)
    state = watch_of(base.own_model).state
    if state is None or not state.is_plain:
        return None
    return base.number, state.moving


def may_change_unseen(verifier: Verifier, state: State) -> bool:
    """Whether its model, which was in this state, may be another one for a while and no look tells:
    where somebody can write to it, or it writes to itself."""
    writes_to_itself = state is not None and len(state) > 1 and any(state[1])
    return verifier.base.is_handed_out or writes_to_itself


def changed() -> ModelChangedError:
    return ModelChangedError(
        "the model was changed while this answer was under way, so it is of neither model",
        hint="ask again; change weights while no answer is under way",
    )
