"""What recipes, engine files and drafter options share: typed sections out of YAML (core_yaml.py).

Errors name the nearest existing key for an unknown one, and what was expected for a wrong value.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

import yaml
from pydantic import BaseModel as PydanticModel
from pydantic import (
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from medusa_kit.errors import ConfigError, did_you_mean, in_one_line, nearest
from medusa_kit.paths import expanded
from medusa_kit.settings import core_yaml
from medusa_kit.settings.drafter_names import REMOVED
from medusa_kit.shown import shown, shown_json

SWITCHES = {"yes": True, "on": True, "no": False, "off": False}  # as earlier recipes may have them


@dataclass(frozen=True)
class Removed:
    """A key of earlier versions, or some of its values: why it is gone, and what to do now.

    values  the values that are gone, where the key itself stays
    kept    the values of a key that is gone which mean what happens without it: recipes kept
            beside earlier runs give them, so they are read
    """

    why: str
    hint: str
    values: tuple[Any, ...] = ()
    kept: tuple[Any, ...] = ()


class _RemovedError(ValueError):
    def __init__(self, name: str, value: Any, removed: Removed) -> None:
        super().__init__(f"{name} = {shown(value)} is no longer there: {removed.why}")
        self.hint = removed.hint


class _ExpectedError(ValueError):
    """A value of another kind; the text says what was expected."""


class Section(PydanticModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    removed: ClassVar[Mapping[str, Removed]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        remaining = dict(raw)
        for name, removed in cls.removed.items():
            if name in raw and (raw[name] in removed.values or not removed.values):
                if raw[name] not in removed.kept:
                    raise _RemovedError(name, raw[name], removed)
                del remaining[name]
        return remaining

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """A number as YAML writes it, where a number is expected. A switch is none, and neither 1
        nor the text "true" is a switch, whatever Python and pydantic take them for."""
        kind = cls.model_fields[str(info.field_name)].annotation
        members = _members(kind)
        if _takes_numbers(kind):
            if isinstance(value, bool) and bool not in members:
                raise _ExpectedError("expected a number")
            return core_yaml.number_of(value)
        if bool not in members or str in members:
            return value
        value = SWITCHES.get(value.lower(), value) if isinstance(value, str) else value
        if not isinstance(value, bool) and not (value is None and type(None) in members):
            raise _ExpectedError("expected true or false")
        return value


def _members(kind: Any) -> tuple[Any, ...]:
    """The types that an annotation names, at any depth."""
    return (kind, *(member for part in get_args(kind) for member in _members(part)))


def _takes_numbers(kind: Any) -> bool:
    members = _members(kind)
    containers = (list, dict, tuple, Mapping)
    return (int in members or float in members) and not any(
        member is str or get_origin(member) in containers for member in members
    )


def read_yaml(path: Path, expected: str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError; `expected`: what the file should be."""
    path = expanded(path)
    if not path.is_file():
        raise ConfigError(f"no {expected} at {path}", hint="name a YAML file; see recipes/")
    try:
        raw = core_yaml.load(path.read_text(encoding="utf-8"))
    except core_yaml.GivenTwiceError as error:
        raise ConfigError(f"{path}: {error}", hint="keep one of them") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {in_one_line(error)}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}; expected sections with keys")
    return raw


def apply_override(
    raw: dict[str, Any],
    item: str,
    what: str = "override",
    form: str = "section.key=value",
    example: str = "train.epochs=2",
) -> None:
    """Put one `section.key=value`, the value read as YAML, into what a file would hold.

    Raises ConfigError, in which `what` is the item's name.
    """
    name, equals, text = item.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"{what} {item!r} is not of the form {form}", hint=f"for example {example}"
        )
    section = raw
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{what} {item!r}: {part!r} is a value, not a section")
    try:
        section[parts[-1]] = core_yaml.load(text)
    except (yaml.YAMLError, RecursionError) as error:
        reason = in_one_line(error)
        raise ConfigError(f"{what} {item!r}: the value is no YAML: {reason}") from error


def explain(
    error: ValidationError, where: str, kind: type[Section], unknown: str = "unknown key"
) -> ConfigError:
    """A ConfigError for what pydantic refused in a `kind`; the hint: for the first unknown key."""
    problems, hint = [], None
    wrong: dict[str, tuple[Any, list[str]]] = {}  # a value, and what each of its types expected
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            problems.append(f"{unknown} {name!r}")
            hint = hint or _suggest(name, kind)
        elif item["type"] == "missing":
            problems.append(f"{name!r} is missing")
        elif item["type"] == "value_error" and not _names_kind(item):
            hint = hint or getattr(item["ctx"]["error"], "hint", None)
            problems.append(
                f"{name}: {item['ctx']['error']}" if name else str(item["ctx"]["error"])
            )
        else:
            # Instances are of our own classes, which files cannot hold.
            message = re.sub(r"^Value error, | or instance of \w+$", "", item["msg"])
            expected = message.replace("Input should be", "expected")
            fields = (str(part) for part in item["loc"] if not _names_a_type(part))
            wrong.setdefault(".".join(fields), (item["input"], []))[1].append(expected)
            if item["type"] == "string_type" and isinstance(item["input"], int | float):
                hint = hint or "text that YAML reads as something else goes in quotes"
            if item["type"] == "literal_error":
                words = re.findall(r"'([^']*)'", item["ctx"]["expected"])
                removed = REMOVED.get(str(item["input"]))
                hint = hint or removed or did_you_mean(item["input"], words)
    for name, (value, allowed) in wrong.items():
        others = (f" or {each.removeprefix('expected ')}" for each in allowed[1:])
        problems.append(f"{name} = {shown_json(value)}: {allowed[0]}{''.join(others)}")
    return ConfigError(f"{where}: {'; '.join(problems)}", hint=hint)


def _names_kind(item: Any) -> bool:
    return isinstance(item["ctx"]["error"], _ExpectedError)


def _names_a_type(part: str | int) -> bool:
    """Whether a part of an error's location names a type, as pydantic adds for unions."""
    return isinstance(part, str) and re.match(r"constrained-|\w+\[", part) is not None


def _suggest(name: str, kind: type[Section]) -> str:
    """That key of another section, else the nearest of the same section, else of all sections, else
    the section's keys."""
    section, _, key = name.rpartition(".")
    known = list(_known_keys(kind))
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    elsewhere = {k.rpartition(".")[2]: k for k in known}
    if key in elsewhere:
        return f"did you mean {elsewhere[key]}?"
    if close := nearest(key, siblings):
        return f"did you mean {section + '.' if section else ''}{close}?"
    if close := nearest(key, elsewhere):
        return f"did you mean {elsewhere[close]}?"
    return f"known keys: {', '.join(siblings) or 'none'}"


def _known_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for kind in get_args(field.annotation) or (field.annotation,):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _known_keys(kind, f"{prefix}{name}.")
