"""Numbers of schemas that llguidance would change. It keeps each as a double, and the bounds of
integers with 64 bits."""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

SAFE = 2**53 - 1  # up to here each integer is a double of its own
SMALLEST, LARGEST = -(2**63), 2**63 - 1
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def number_fault(schema: Mapping[str, Any]) -> str | None:
    """Which number of a schema, without those inside of it, cannot be followed exactly."""
    for key in ("const", "enum"):
        for number in _numbers(schema.get(key)):
            if abs(number) > SAFE:
                return f"{number} cannot be followed exactly; expected -{SAFE} to {SAFE}"
    for key in BOUNDS:
        bound = schema.get(key)
        if _is_number(bound) and not _is_exact(schema, key, bound):
            return f"the bound {bound} cannot be followed exactly; expected -{SAFE} to {SAFE}"
    return None


def _is_number(value: Any) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _numbers(value: Any) -> Iterator[int | float]:
    if _is_number(value):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value
    for part in parts if isinstance(value, Mapping | list) else ():
        yield from _numbers(part)


def _is_exact(schema: Mapping[str, Any], key: str, bound: int | float) -> bool:
    try:
        read = float(bound)
    except OverflowError:
        return False
    if not math.isfinite(read):
        return True  # no JSON, which others say
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" not in kinds or "number" in kinds:
        return Decimal(repr(read)) == (bound if isinstance(bound, int) else Decimal(repr(bound)))
    nearest, step = _nearest(schema, key, bound)
    rounded, _ = _nearest(schema, key, read)
    found = int(float(rounded) + step)  # as llguidance does
    return nearest + step == min(max(found, SMALLEST), LARGEST)


def _nearest(schema: Mapping[str, Any], key: str, bound: int | float) -> tuple[int, int]:
    """The integer nearest to a bound, and the step from there to one that keeps it."""
    lower = key.lower().endswith("minimum")
    nearest = math.ceil(bound) if lower else math.floor(bound)
    # Earlier drafts have `true` beside the bound itself.
    outside = key.startswith("exclusive") or schema.get(f"exclusive{key.capitalize()}") is True
    return nearest, (1 if lower else -1) if outside and nearest == bound else 0
