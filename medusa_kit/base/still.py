"""What is made of a model while somebody may be changing it.

Whoever makes something notes how often the model had changed at the beginning, so that the next
look tells whether it still holds. Where making it failed, a look tells whether that was the model's
fault: what is read of it amid a change is of no state that it ever had.
"""

from collections.abc import Callable
from typing import TypeVar

from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.errors import IncompatibleBaseError, MedusaKitError, ModelChangedError

TRIES = 4
R = TypeVar("R")


def while_still(look: Callable[[], int], make: Callable[[], R], before: int | None = None) -> R:
    """What `make` makes of a model, tried once more where it failed and the model had changed
    meanwhile. `look`: counts the model's changes. `before`: the count, where somebody has just
    looked.

    Raises what `make` raises of a model that stood still, IncompatibleBaseError where the model's
    own code failed, ModelChangedError for a model that goes on changing.
    """
    before, failures = look() if before is None else before, dict[str, Exception]()
    for _ in range(TRIES):
        try:
            return make()
        except Exception as error:
            failures[f"{type(error).__name__}: {error}"] = failure = error
        after = look()
        if after == before:
            raise _told(failure)
        before = after
    if len(failures) == 1:  # the model writes to itself
        raise _told(*failures.values())
    raise ModelChangedError(
        f"the model was changed {TRIES} times while it was looked at, so nothing could be made of "
        "any of its states",
        hint="ask again; change weights while nothing else is done with the model",
    )


def _told(failure: Exception) -> Exception:
    if isinstance(failure, MedusaKitError) or is_out_of_memory(failure):
        return failure
    told = IncompatibleBaseError(
        f"the model does not run as it is now: {type(failure).__name__}: {failure}",
        hint="a forward of transformers' own model shows where; put right what was changed in it",
    )
    told.__cause__ = failure
    return told
