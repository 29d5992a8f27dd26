"""How many patterns a schema asks one text to fit at once. llguidance tries their intersection, in
time and memory that double with each of them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MAX_VISITS = 20_000  # of subschemas; references can name more than anybody could visit
Counts = Counter[tuple[str, ...]]  # of patterns, by the path in a value


def max_joined(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> int:
    """How many patterns one text has to fit at most, at any path of the values that `schema` is
    for. `whole`: has what references name."""
    return max(_Count(whole).at(schema, (), frozenset()).values(), default=0)


def part_of(whole: Any, reference: Any) -> Any:
    """The part of a schema that a reference names. Raises LookupError where there is none."""
    if not isinstance(reference, str):
        raise LookupError(reference)
    own = whole.get("$id") if isinstance(whole, Mapping) else None
    local = reference.removeprefix(own) or "#" if isinstance(own, str) and own else reference
    if not (local + "/").startswith("#/"):
        raise LookupError(reference)
    part = whole
    for name in steps_of(local):
        if isinstance(part, list):
            part = part[int(name) if name.isdecimal() else len(part)]
        elif isinstance(part, Mapping):
            part = part[name]
        else:
            raise LookupError(reference)
    return part


def steps_of(pointer: str) -> list[str]:
    """The names on the way to a part, from a reference's `#/…`."""
    names = unquote(pointer).split("/")[1:]
    return [name.replace("~1", "/").replace("~0", "~") for name in names]


class _Count:
    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole, self._visits = whole, 0

    def at(self, schema: Any, path: tuple[str, ...], inside: frozenset[str]) -> Counts:
        """Patterns by path at and below `path`. `inside`: references on the way there."""
        self._visits += 1
        if not isinstance(schema, Mapping) or self._visits > MAX_VISITS:
            return Counter()
        counts = Counter({path: int("pattern" in schema)})
        for part in _listed(schema, "allOf"):
            counts += self.at(part, path, inside)
        for key in ("anyOf", "oneOf"):
            alternatives: Counts = Counter()
            for part in _listed(schema, key):
                alternatives |= self.at(part, path, inside)
            counts += alternatives
        if isinstance(reference := schema.get("$ref"), str) and reference not in inside:
            counts += self.at(self._named(reference), path, inside | {reference})
        properties = schema.get("properties")
        for name, part in properties.items() if isinstance(properties, Mapping) else ():
            counts += self.at(part, (*path, name), inside)
        for key in ("items", "additionalProperties"):
            counts += self.at(schema.get(key), (*path, f"{key} "), inside)
        return counts

    def _named(self, reference: str) -> Any:
        try:
            return part_of(self._whole, reference)
        except LookupError:
            return None


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
