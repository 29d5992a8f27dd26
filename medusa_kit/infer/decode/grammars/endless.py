"""References that lead back to themselves, so that no value fits which ever ends: a model would
write on, or have no token to write."""

from collections.abc import Mapping
from typing import Any

from medusa_kit.infer.decode.grammars.joined_patterns import MAX_VISITS, part_of

NOTES = ("title", "description", "default", "examples")  # keywords that no value has to fit


def refers_among_others(schema: Mapping[str, Any]) -> bool:
    """Whether a schema has a reference beside other keywords. llguidance puts what it names in its
    place then."""
    return "$ref" in schema and not schema.keys() <= {"$ref", *NOTES}


def comes_back(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Whether such a schema is part of what would be put in its place."""
    seen, waiting = set[str](), [schema.get("$ref")]
    while waiting:
        reference = waiting.pop()
        if not isinstance(reference, str) or reference in seen:
            continue
        seen.add(reference)
        try:
            parts = [part_of(whole, reference)]
        except LookupError:
            continue
        while parts:
            part = parts.pop()
            if part == schema:
                return True
            if isinstance(part, Mapping):
                waiting += [part["$ref"]] if refers_among_others(part) else []
                parts += part.values()
            elif isinstance(part, list):
                parts += part
    return False


def is_endless(reference: str, whole: Mapping[str, Any]) -> bool:
    """Whether no value that ends fits what a reference of the schema `whole` names."""
    return not _Ends(whole).at({"$ref": reference}, frozenset())


class _Ends:
    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole, self._visits = whole, 0
        self._ending: set[str] = set()  # references

    def at(self, schema: Any, inside: frozenset[str]) -> bool:
        """Whether a value fits. `inside`: references on the way here."""
        self._visits += 1
        if not isinstance(schema, Mapping) or self._visits > MAX_VISITS:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._named(reference, inside):
            return False
        for key in ("anyOf", "oneOf"):
            either = schema.get(key)
            if isinstance(either, list) and not any(self.at(part, inside) for part in either):
                return False
        parts = [*_needed_items(schema), *_needed_properties(schema)]
        every = schema.get("allOf")
        return all(self.at(part, inside) for part in [*parts, *_list(every)])

    def _named(self, reference: str, inside: frozenset[str]) -> bool:
        if reference in inside or reference in self._ending:
            return reference in self._ending
        try:
            named = part_of(self._whole, reference)
        except LookupError:
            return True
        if ends := self.at(named, inside | {reference}):
            self._ending.add(reference)
        return ends


def _needed_properties(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the properties that each value has."""
    if schema.get("type") not in ("object", ["object"]):
        return []
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    others = schema.get("additionalProperties") if "patternProperties" not in schema else True
    names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
    return [known.get(name, others) for name in names]


def _needed_items(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that each value has."""
    least = schema.get("minItems")
    if schema.get("type") not in ("array", ["array"]) or not isinstance(least, int | float):
        return []
    items = schema.get("items")
    first = items if isinstance(items, list) else _list(schema.get("prefixItems"))
    others = schema.get("additionalItems") if isinstance(items, list) else items
    return [part for place, part in enumerate(first) if place < least] + (
        [others] if least > len(first) else []
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
