"""Schemas that llguidance can follow. What it cannot is refused where a caller asked for
strictness, and left out of the subschema that has it where not. What takes too much is refused in
any case, here or by the budget of the process that this runs in (serve/bounded/)."""

import json
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.grammars.endless import (
    NOTES,
    comes_back,
    is_endless,
    refers_among_others,
)
from medusa_kit.infer.decode.grammars.exact_numbers import number_fault
from medusa_kit.infer.decode.grammars.joined_patterns import max_joined, part_of
from medusa_kit.infer.decode.grammars.name_escapes import (
    escape_fault,
    has_open_names,
    needs_escape,
    without_name_escapes,
)
from medusa_kit.infer.decode.grammars.source import HINT, begun_fault_of, fault_of
from medusa_kit.settings.grammar import Grammar

OPTIONS = "x-guidance"
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # keywords -> schemas
OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
ALONE = ("items", "additionalItems", "additionalProperties")
# Without these a schema would be another one. They come first, in this order.
NEEDED = ("type", "properties")
# What a keyword's absence would change the meaning of: it goes too, so that nothing gets narrower.
RESTS = {"patternProperties": "additionalProperties", "prefixItems": "items"}
PLAIN = frozenset(["type", *NOTES])
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
COSTLY = ("pattern", "format", "multipleOf")
MAX_WORK = 200_000  # for one value; more takes seconds, and fails in the end
MAX_MULTIPLE = 10_000  # llguidance has a state for each remainder, and no limit
MAX_JOINED = 8  # patterns of one text
# Schemas, since agents send the same tools again and again, and how long one of these may be.
KEPT, MAX_KEPT = 1024, 65_536


class Usable(NamedTuple):
    """A schema to follow. `notes`: what was left out of the one that was given."""

    schema: dict[str, Any]
    notes: tuple[str, ...] = ()


def usable(field: str, schema: Mapping[str, Any], strict: bool) -> Usable:
    """A schema that llguidance can follow. Raises ConfigError, naming the property of `field`, for
    what it cannot follow where `strict`, and for what no schema can be."""
    given = json.dumps(schema)
    read = _usable if len(given) <= MAX_KEPT else _usable.__wrapped__
    try:
        text, notes = read(field, given, strict)
    except ConfigError as error:
        if error.message.startswith(field):
            raise
        raise ConfigError(f"{field}: {error.message}", hint=error.hint) from error
    return Usable(json.loads(text), notes)


@lru_cache(KEPT)
def _usable(field: str, text: str, strict: bool) -> tuple[str, tuple[str, ...]]:
    schema = json.loads(text)
    walk = _Walk(schema, strict)
    walk.check_frame(field)
    kept = walk.followed(field, schema)
    if (fault := walk.fault(kept, whole=True)) is not None:  # by what references name together
        walk.leave_out(field, "all of it", fault)
        kept = {"type": "object"}
    return json.dumps({**kept, OPTIONS: walk.options}), tuple(walk.notes)


class _Walk:
    """Through a whole schema, from which it takes llguidance's options."""

    def __init__(self, whole: dict[str, Any], strict: bool) -> None:
        self._whole, self._strict = whole, strict
        self.options = whole.pop(OPTIONS, {})
        if isinstance(self.options, Mapping):  # oneOf is read as anyOf where it has to be
            self.options = {"coerce_one_of": not strict, **self.options}
            if has_open_names(whole) and (strict or not needs_escape(whole)):
                self.options = without_name_escapes(self.options)
        self.notes: list[str] = []

    def check_frame(self, field: str) -> None:
        """What each subschema depends on: the whole schema's draft, and its options."""
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"{field}.{OPTIONS} {self.options!r}: expected an object")
        if (fault := self.fault({})) is None:
            return
        if self._whole.pop("$schema", None) is None or self.fault({}) is not None:
            raise ConfigError(f"{field}.{OPTIONS}: {fault}", hint=HINT)
        self.leave_out(field, "$schema", fault)

    def followed(self, field: str, schema: Any) -> Any:
        """A subschema without what cannot be followed; what is inside of it comes first."""
        if not isinstance(schema, Mapping):
            return schema
        if schema.keys() <= PLAIN and schema.get("type") in TYPES:
            return schema
        schema = self._with_followed_parts(field, schema)
        return schema if self.fault(schema) is None else self._without_faults(field, schema)

    def _without_faults(self, field: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        kept, left_out = dict[str, Any](), set[str]()
        for key in sorted(schema, key=lambda key: key not in NEEDED):
            if (fault := self.fault({**kept, key: schema[key]})) is None:
                kept[key] = schema[key]
                continue
            if key == "type" or (key in NEEDED and not isinstance(schema[key], Mapping)):
                raise ConfigError(f"{field}: the JSON schema cannot be used: {fault} ({key})")
            self.leave_out(field, key, fault)
            left_out |= {key, RESTS.get(key, key)}
        return {key: schema[key] for key in schema if key not in left_out}

    def _with_followed_parts(self, field: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        parts = dict(schema)
        for key, value in schema.items():
            if key in OF_NAMES and isinstance(value, Mapping):
                parts[key] = {
                    name: self.followed(f"{field}.{key}.{_written(name)}", part)
                    for name, part in value.items()
                }
            elif key in OF_LISTS and isinstance(value, list):
                parts[key] = [
                    self.followed(f"{field}.{key}[{index}]", part)
                    for index, part in enumerate(value)
                ]
            elif key in ALONE:
                parts[key] = self.followed(f"{field}.{key}", value)
        if "$ref" in parts and (fault := self._reference_fault(schema)) is not None:
            del parts["$ref"]
            self.leave_out(field, "$ref", fault)
        for name in self._wrong_patterns(parts.get("patternProperties")):
            patterns = f"{field}.patternProperties"
            self.leave_out(patterns, _written(name), "no such expression can be followed")
            del parts["patternProperties"][name]
            parts.pop("additionalProperties", None)
        return parts

    def _reference_fault(self, schema: Mapping[str, Any]) -> str | None:
        reference = schema["$ref"]
        try:
            part_of(self._whole, reference)
        except LookupError:
            return f"the schema has no {reference!r}"
        if is_endless(reference, self._whole):
            return f"{reference!r} leads back to itself, so that no value would end"
        if refers_among_others(schema) and comes_back(schema, self._whole):
            return f"{reference!r} leads back to this place, which has other keywords too"
        return None

    def _wrong_patterns(self, patterns: Any) -> list[str]:
        names = list(patterns) if isinstance(patterns, Mapping) else []
        return [name for name in names if self.fault({"patternProperties": {name: True}})]

    def fault(self, schema: Mapping[str, Any], whole: bool = False) -> str | None:
        """Why a subschema cannot be followed. References are taken for known unless it is the
        `whole` schema: the schemas that they name are walked through in their own place. Raises
        ConfigError for what would take gigabytes to find out."""
        if (multiple := schema.get("multipleOf")) is not None and _digits(multiple) > MAX_MULTIPLE:
            return f"multipleOf {multiple!r} is too large, or has too many digits"
        if (fault := number_fault(schema) or escape_fault(schema, self.options)) is not None:
            return fault
        joins = not schema.keys().isdisjoint(("allOf", "$ref"))
        if joins and (joined := max_joined(schema, self._whole)) > MAX_JOINED:
            limit = f"one text has to fit {joined} patterns; expected {MAX_JOINED} at most"
            raise ConfigError(f"the JSON schema cannot be used: {limit}", hint=HINT)
        given = schema if whole else _without_references(schema)
        draft = {key: value for key, value in self._whole.items() if key == "$schema"}
        grammar = Grammar.json_schema({**draft, **given, OPTIONS: self.options})
        if (fault := fault_of(grammar)) is not None:
            return fault
        if whole:
            return begun_fault_of(grammar)
        alone = given.keys().isdisjoint((*OF_NAMES, *OF_LISTS, *ALONE))
        costly = alone and not given.keys().isdisjoint(COSTLY)
        return begun_fault_of(grammar, MAX_WORK) if costly else None

    def leave_out(self, field: str, key: str, fault: str) -> None:
        if self._strict:
            message = f"{field}: the JSON schema cannot be used: {fault} ({key})"
            raise ConfigError(message, hint=HINT)
        self.notes.append(f"{field}: {key} is not enforced")


def _without_references(schema: Any) -> Any:
    """Any reference is taken for one to whatever there may be. What is no schema, such as a
    constant, stays as it is."""
    if not isinstance(schema, Mapping):
        return schema
    parts = {key: value for key, value in schema.items() if key != "$ref"}
    for key, value in parts.items():
        if key in OF_NAMES and isinstance(value, Mapping):
            parts[key] = {name: _without_references(part) for name, part in value.items()}
        elif key in OF_LISTS and isinstance(value, list):
            parts[key] = [_without_references(part) for part in value]
        elif key in ALONE:
            parts[key] = _without_references(value)
    return parts


def _digits(number: Any) -> int:
    """A number without its decimal point."""
    read = Decimal(str(number)) if type(number) in (int, float) else Decimal(0)
    if not read.is_finite():
        return 0
    _, digits, exponent = read.as_tuple()
    return int("".join(map(str, digits))) * 10 ** min(max(int(exponent), 0), 9)


def _written(name: str) -> str:
    """A property's name in a path, without spaces and what else would end it."""
    return quote(name, safe="$")
