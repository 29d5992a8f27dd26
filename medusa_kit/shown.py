"""Values as messages show them: on one line, and of a long one the beginning. What is left out is
marked by … behind the quotes of a text, so that nobody takes it for a part of the value."""

import reprlib
from itertools import islice
from typing import Any

MAX_SHOWN = 100  # characters of a text, or of what an object says of itself
MAX_ITEMS, MAX_DEPTH = 8, 3  # of lists and mappings in one another
CUT = "…"


def shown(value: Any) -> str:
    """A value for a message, as Python writes it."""
    return _PYTHON.repr(value)


def shown_json(value: Any) -> str:
    """The same with JSON's words, true, false and null, for who sent JSON."""
    return _JSON.repr(value)


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.fillvalue = CUT
        self.maxlevel = MAX_DEPTH
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = MAX_ITEMS

    def repr_str(self, x: str, level: int) -> str:
        return repr(x) if len(x) <= MAX_SHOWN else f"{x[:MAX_SHOWN]!r}{CUT}"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= MAX_SHOWN else f"{x[:MAX_SHOWN]!r}{CUT}"

    def repr_int(self, x: int, level: int) -> str:
        return self.repr_instance(x, level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In its own order."""
        if x and level <= 0:
            return f"{{{CUT}}}"
        pairs = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
                 for key, value in islice(x.items(), self.maxdict)]  # fmt: skip
        return f"{{{', '.join(pairs + [CUT] * (len(x) > self.maxdict))}}}"

    def repr_instance(self, x: Any, level: int) -> str:
        """Any other object. Python does not write integers of some thousand digits."""
        try:
            text = " ".join(repr(x).split())
        except Exception:  # code of its own
            kind = type(x).__name__
            return "an integer of too many digits" if isinstance(x, int) else f"<{kind}>"
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}{CUT}"


class _Json(_Shown):
    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"


_PYTHON, _JSON = _Shown(), _Json()
