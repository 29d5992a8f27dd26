"""A wrong value of a request, as a message needs it, without the body that it was in."""

from typing import Any, NamedTuple

from medusa_kit.shown import MAX_SHOWN, shown_json

KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a string",
         list: "a list", dict: "an object", type(None): "null"}  # fmt: skip


class Given(NamedTuple):
    """`shown`: for a message. `kind`: in JSON's words. `value`: None of what is long."""

    shown: str
    kind: str
    size: int
    value: Any

    @classmethod
    def of(cls, value: Any) -> "Given":
        if isinstance(value, Given):
            return value
        size = len(value) if isinstance(value, str | list | dict) else 0
        short = isinstance(value, bool | int | float | str) and size <= MAX_SHOWN
        kind = KINDS.get(type(value), "no JSON")
        return cls(shown_json(value), kind, size, value if short else None)
