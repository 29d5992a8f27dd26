"""How many patterns a schema asks one text to fit at once. llguidance tries their intersection, in
time and memory that double with each of them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MAX_VISITS = 20_000  # of subschemas; references can name more than anybody could visit
Counts = Counter[tuple[str, ...]]  # of patterns, by the place in a value


def most_joined(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> int:
    """At any one place of the values that `schema` is for. `whole`: has what references name."""
    return max(_Count(whole).at(schema, (), frozenset()).values(), default=0)


def part_of(whole: Any, reference: Any) -> Any:
    """What a reference names in a schema. Raises LookupError where that is nothing."""
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        raise LookupError(reference)
    part, names = whole, unquote(reference).split("/")[1:]
    for name in (name.replace("~1", "/").replace("~0", "~") for name in names):
        if isinstance(part, list):
            part = part[int(name) if name.isdecimal() else len(part)]
        elif isinstance(part, Mapping):
            part = part[name]
        else:
            raise LookupError(reference)
    return part


class _Count:
    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole, self._visits = whole, 0

    def at(self, schema: Any, place: tuple[str, ...], inside: frozenset[str]) -> Counts:
        """`inside`: references on the way here."""
        self._visits += 1
        if not isinstance(schema, Mapping) or self._visits > MAX_VISITS:
            return Counter()
        counts = Counter({place: int("pattern" in schema)})
        for one in _listed(schema, "allOf"):
            counts += self.at(one, place, inside)
        for key in ("anyOf", "oneOf"):
            alternatives: Counts = Counter()
            for one in _listed(schema, key):
                alternatives |= self.at(one, place, inside)
            counts += alternatives
        if isinstance(reference := schema.get("$ref"), str) and reference not in inside:
            counts += self.at(self._named(reference), place, inside | {reference})
        properties = schema.get("properties")
        for name, one in properties.items() if isinstance(properties, Mapping) else ():
            counts += self.at(one, (*place, name), inside)
        for key in ("items", "additionalProperties"):
            counts += self.at(schema.get(key), (*place, f"{key} "), inside)
        return counts

    def _named(self, reference: str) -> Any:
        try:
            return part_of(self._whole, reference)
        except LookupError:
            return None


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
