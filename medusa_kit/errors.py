"""Every error medusa-kit raises on purpose.

MedusaKitError                 exit 1: a run failed
├── UsageError                 exit 2: the call itself is wrong
│   ├── ConfigError            a recipe, an override or an option
│   ├── TreeError              a candidate tree that cannot exist or does not fit the heads
│   └── UnknownModelError      a request for a model, or heads of it, that is not served
├── DataError                  a data file or a row of it
├── CheckpointError            heads, statistics or a model that is missing, cut off or malformed
│   └── HubError               the Hub refuses, cannot be reached, or has no such thing
├── IncompatibleBaseError      heads on the wrong base, or a base that trees cannot be verified on
├── ContextLengthError         a prompt that does not fit the model's context
├── DeviceMemoryError          a request that the device's memory cannot hold
├── WriteError                 a file that cannot be written whole; an OSError too
├── QueueFullError             more requests at once than may wait; later there may be room
└── ClosedError                a request to what has been closed, or belongs to another process

A message names the value and what was expected; `hint` says what to do about it.
"""

import difflib
import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any, TypeVar


class MedusaKitError(Exception):
    """Base of the tree. `str(error)` is the message, then the hint on a line of its own."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(MedusaKitError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class TreeError(UsageError):
    pass


class UnknownModelError(UsageError):
    pass


class DataError(MedusaKitError):
    pass


class CheckpointError(MedusaKitError):
    pass


class HubError(CheckpointError):
    pass


class IncompatibleBaseError(MedusaKitError):
    pass


class ContextLengthError(MedusaKitError):
    pass


class DeviceMemoryError(MedusaKitError):
    pass


class WriteError(MedusaKitError, OSError):
    pass


class QueueFullError(MedusaKitError):
    pass


class ClosedError(MedusaKitError):
    pass


AnyError = TypeVar("AnyError", bound=MedusaKitError)


def nearest(value: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known word closest to `value`, or None when nothing is close."""
    matches = difflib.get_close_matches(value, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


DID_YOU_MEAN = "did you mean {}?"


def did_you_mean(value: Any, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """The hint for a word that is none of `known`; `otherwise`: the hint where nothing is close."""
    close = nearest(str(value), known)
    return DID_YOU_MEAN.format(close) if close else otherwise


def unknown_value(
    what: str,
    value: Any,
    known: Iterable[str],
    otherwise: str | None = None,
    kind: type[AnyError] = ConfigError,  # type: ignore[assignment]
) -> AnyError:
    """The error, to be raised, for a value that is none of `known`; `what`: the value's name."""
    words = list(known)
    expected = " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
    return kind(
        f"{what} {value!r} is unknown; expected {expected}",
        hint=did_you_mean(value, words, otherwise),
    )


def in_one_line(error: BaseException) -> str:
    """What an error of a library says, whose own text may have several lines."""
    return " ".join(str(error).split())


def is_finite(value: Any) -> bool:
    """Whether it is a number, other than infinite and NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_count(name: str, value: Any) -> None:
    """Raises ConfigError for anything but an integer from 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise ConfigError(f"{name} {value!r} is out of range; expected an integer, 1 or more")
