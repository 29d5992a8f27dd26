"""What an option is, said once: by a field of a dataclass, its type, default and description.

    max_rows: Annotated[int, "Requests decoded at once, in one batch.", COUNT] = 8

The command line, engine files, checks of values, `help(medusa_kit.load)` and the tables in the docs
are made from it. In a description {values} stands for the allowed words, {allowed} for the words of
`Allowed`. `Any` in a type stands for what Python alone can give: an object. Nothing is imported
here but the standard library, since `--help` is made from it.
"""

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from medusa_kit.errors import ConfigError, unknown_value
from medusa_kit.shown import shown


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What an option takes, in words; of numbers that are finite also as a test."""

    expected: str
    fits: Callable[[Any], bool] = lambda _: True
    hint: str | None = None

    def number(self, name: str, kind: type, value: Any, hint: str | None = None) -> Any:
        """The int or float that `value` is, such as one of numpy's. Raises ConfigError for one that
        does not fit, and for True, which Python takes for 1. `hint`: where there is none of its
        own."""
        number: Any = None
        if isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an integer beyond what a float can hold
                number = kind(value)
        finite = number is not None and (kind is int or math.isfinite(number))
        if not (finite and self.fits(number)):
            message = f"{name} {shown(value)} is out of range; expected {self.expected}"
            raise ConfigError(message, hint=self.hint or hint)
        return number


COUNT = Allowed("an integer, 1 or more", lambda number: number >= 1)
SECONDS = Allowed("seconds above 0", lambda number: number > 0)
# The kinds of value that an option can have which says no more, in words.
KINDS: Mapping[Any, str] = {
    bool: "True or False", str: "text", Mapping: "a mapping with options", list: "a list of text",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Option:
    """One option as others see it."""

    name: str
    kind: Any  # its type, `Any` left out: what can be written down
    default: Any
    description: str
    allowed: Allowed | None = None
    values: tuple[str, ...] = ()  # the allowed words, where they can be counted
    open: bool = False  # whether Python may give an object too

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @functools.cached_property
    def number(self) -> type | None:
        """int or float, where its values are such."""
        return next((kind for kind in (int, float) if kind in choices(self.kind)), None)

    def checked(self, value: Any) -> Any:
        """The value; of a number, such as numpy's, the int or float. Raises ConfigError for a wrong
        one. Objects that only Python can give are left to `check_kind`."""
        if value is None is self.default:
            return None
        if self.values:
            if not isinstance(value, str) or value not in self.values:
                raise unknown_value(self.name, value, self.values, f"leave out {self.name}")
        elif self.number is not None:
            allowed = self.allowed or Allowed("a number")
            return allowed.number(self.name, self.number, value, self.hint)
        elif not self.open:
            kinds = tuple(get_origin(member) or member for member in choices(self.kind))
            usual = " or ".join(KINDS[member] for member in kinds if member in KINDS)
            self.check_kind(value, kinds, self.allowed.expected if self.allowed else usual)
        for text in value if isinstance(value, list) else (value,):
            if isinstance(value, list) and not self.open:
                self.check_kind(text, (str,), KINDS[list])
            if isinstance(text, str) and not text.strip():
                raise ConfigError(f"{self.name} {text!r} is empty", hint=self.hint)
        return value

    def check_kind(self, value: Any, kinds: tuple[type, ...], expected: str) -> None:
        """Raises ConfigError for a value that is none of these."""
        if not isinstance(value, kinds):
            raise ConfigError(
                f"{self.name} {shown(value)} is of type {type(value).__name__}; expected "
                f"{expected}",
                hint=self.hint,
            )

    @property
    def hint(self) -> str:
        given = self.allowed.hint if self.allowed else None
        return given or f"{self.name}: {self.description}"


def _options_of(settings: Any) -> Mapping[str, Option]:
    """The options that the fields of a dataclass are, by name."""
    hints = get_type_hints(settings, include_extras=True)
    fields = dataclasses.fields(settings)
    return {field.name: _option(field, *get_args(hints[field.name])) for field in fields}


# mypy takes some classes for what has no hash.
options_of: Callable[[Any], Mapping[str, Option]] = functools.cache(_options_of)


def _option(
    field: "dataclasses.Field[Any]", kind: Any, description: str, allowed: Allowed | None = None
) -> Option:
    kinds = [member for member in choices(kind) if member is not Any]
    is_open = len(kinds) < len(choices(kind))
    written = functools.reduce(lambda member, following: member | following, kinds)
    values = tuple(v for member in kinds if get_origin(member) is Literal for v in get_args(member))
    listed = f"{', '.join(values[:-1])} or {values[-1]}" if values else ""
    expected = allowed.expected if allowed else ""
    description = description.format(values=listed, allowed=expected)
    return Option(field.name, written, field.default, description, allowed, values, is_open)


def choices(kind: Any) -> tuple[Any, ...]:
    """The members of a union; any other type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def check_fields(settings: Any) -> None:
    """Check every option of a dataclass, and keep numbers as int and float. Raises ConfigError."""
    for option in options_of(type(settings)).values():
        value = option.checked(getattr(settings, option.name))
        object.__setattr__(settings, option.name, value)
