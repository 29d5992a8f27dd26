"""Every error medusa-kit raises on purpose.

MedusaKitError                 exit 1: a run failed
├── UsageError                 exit 2: the call itself is wrong
│   ├── ConfigError            a recipe, an override or an option
│   ├── TreeError              a candidate tree that cannot exist or does not fit the heads
│   └── UnknownModelError      a request for a model, or heads of it, that is not served
├── DataError                  a data file or a row of it
├── CheckpointError            heads, statistics or a model that is missing, cut off or malformed
│   ├── HubError               the Hub refuses, cannot be reached, or has no such thing
│   └── StorageError           files that are there, which this machine cannot read now
├── IncompatibleBaseError      heads on the wrong base, or a base that trees cannot be verified on
├── ModelChangedError          an answer under way while its model was changed
├── ContextLengthError         a prompt that does not fit the model's context
├── DeviceMemoryError          a request that the device's memory cannot hold
├── NotFiniteError             numbers that became NaN or infinite: in training, or a model's scores
├── WriteError                 a file that cannot be written whole; an OSError too
├── QueueFullError             more requests at once than may wait; later there may be room
└── ClosedError                a request to what has been closed, or belongs to another process

A message names the value and what was expected; `hint` says what to do about it.
"""

import difflib
import math
import re
from collections.abc import Iterable
from numbers import Integral
from typing import Any, Self, TypeVar

from medusa_kit.shown import shown


class MedusaKitError(Exception):
    """Base of the tree. `str(error)` is the message, then the hint on a line of its own."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = without_digits(without_stack(message))
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


class StorageError(CheckpointError):
    pass


class IncompatibleBaseError(MedusaKitError):
    pass


class ModelChangedError(MedusaKitError):
    pass


class ContextLengthError(MedusaKitError):
    pass


class DeviceMemoryError(MedusaKitError):
    pass


class NotFiniteError(MedusaKitError):
    pass


class WriteError(MedusaKitError, OSError):
    pass


class QueueFullError(MedusaKitError):
    pass


class ClosedError(MedusaKitError):
    pass


class Live:
    """A mixin of what threads, a device or memory of C++ belong to: a copy would share them, and
    what is pickled would lack them."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"this {type(self).__name__} is in use, and can be neither copied nor pickled",
            hint="pass the object itself to threads; load an engine of its own in each process",
        )

    def _twin(self) -> Self:
        """Another object with the same attributes, for code of ours that sets some apart."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


AnyError = TypeVar("AnyError", bound=MedusaKitError)
# Of torch's messages, as it is built or with TORCH_SHOW_CPP_STACKTRACES.
STACKS = (
    re.compile(r"\s*Exception raised from .*(?:\n(?:C\+\+ CapturedTraceback:|frame #|#\d+ |<).*)*"),
    re.compile(r"\[enforce fail at [^\]]*\] ?"),
    re.compile(r" ?at \"?[\w./+-]+\.(?:cpp|cc|cuh|cu|hpp|h)\"?:\d+"),
)
MAX_COMPARED = 300  # characters of a word whose nearest is looked for


def nearest(value: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known word closest to `value` in any case, or None when nothing is close."""
    if len(value) > MAX_COMPARED:  # which takes long, and is close to none
        return None
    words = {word.lower(): word for word in known}
    matches = difflib.get_close_matches(value.lower(), words, n=1, cutoff=cutoff)
    return words[matches[0]] if matches else None


DID_YOU_MEAN = "did you mean {}?"


def near_beginning(value: str, known: Iterable[str]) -> str | None:
    """The known word that begins nearly as `value` goes on to its end."""
    words = {word[: len(value) + 1]: word for word in sorted(known, reverse=True)}
    close = nearest(value, words, cutoff=0.8) if len(value) > 3 else None
    return None if close is None else words[close]


def did_you_mean(value: Any, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """The hint for a word that is none of `known`; `otherwise`: the hint where nothing is close."""
    close = nearest(value, known) if isinstance(value, str) else None
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
        f"{what} {shown(value)} is unknown; expected {expected}",
        hint=did_you_mean(value, words, otherwise),
    )


def without_stack(text: str) -> str:
    """What a library says, without the stack of C++ and the places in its source."""
    for pattern in STACKS:
        text = pattern.sub("", text)
    return text


def without_digits(text: str) -> str:
    """A text in which integers of hundreds of digits are cut short."""
    return re.sub(r"\d{300,}", lambda found: f"{found[0][:20]}… ({len(found[0]):,} digits)", text)


def unreadable(error: Exception) -> type[CheckpointError]:
    """The kind of error for a file that could not be read: whether the file is to blame for it, or
    the machine (too many open files, no right to read it, a disk that fails)."""
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    own = isinstance(error, OSError) and not isinstance(error, missing)
    return StorageError if own else CheckpointError


def in_one_line(error: BaseException) -> str:
    """What an error of a library says, whose own text may have several lines."""
    return " ".join(str(error).split())


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that are no text, without the decoder's own words."""
    what = "it is not a text file" if b"\0" in error.object else "it may be in another encoding"
    return f"{what} (a byte 0x{error.object[error.start]:02x})"


def first_found(error: Exception) -> str:
    """The first thing that pydantic found wrong, and where; what any other error says."""
    if (found := getattr(error, "errors", None)) is None:
        return in_one_line(error)
    first = found()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")


def half_pair(text: str, of: str = "") -> str | None:
    """What is wrong with a text that holds half of a surrogate pair, which no UTF-8 has; None where
    nothing is. Bytes that are no UTF-8 become some on a command line, and JSON may hold them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        number = ord(text[error.start])
        return f"character {error.start + 1}{of} is U+{number:04X}, half of a surrogate pair"
    return None


def is_finite(value: Any) -> bool:
    """Whether it is a number, other than infinite and NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_count(name: str, value: Any, most: int | None = None) -> None:
    """Raises ConfigError for anything but an integer from 1, up to `most` if there is such."""
    counts = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
    if not counts or (most is not None and int(value) > most):
        upper = "1 or more" if most is None else f"1 to {most:,}"
        raise ConfigError(
            f"{name} {shown(value)} is out of range; expected an integer, {upper}",
            hint="for instance 1",
        )
