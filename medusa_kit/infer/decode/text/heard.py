"""Where the words of an answer begin, before which a model may write thoughts."""

from typing import NamedTuple


class ThoughtMarks(NamedTuple):
    """What stands before thoughts and behind them, and what may stand before the words of the
    answer. `opened`: the prompt ends inside of thoughts."""

    opening: str
    closing: str
    opened: bool = False
    aloud: str = ""


class Heard:
    """Takes an answer's bytes as they come, and gives those that belong to its words."""

    def __init__(self, marks: ThoughtMarks) -> None:
        self._opening, self._closing = marks.opening.encode(), marks.closing.encode()
        self._aloud = marks.aloud.encode()
        self._inside: bool | None = marks.opened or None  # of thoughts; None: not known yet
        self._past = False  # some mark, behind which white space does not count
        self._waiting = b""

    @property
    def num_waiting(self) -> int:
        """How many of the last bytes may turn out to be words."""
        return len(self._waiting) if self._inside is None else 0

    def push(self, data: bytes) -> bytes:
        """The bytes that are known to be words by now, the last ones so far."""
        if self._inside is False:
            return data
        self._waiting += data
        while self._inside is not False:
            waits = self._passes_thoughts() if self._inside else self._passes_mark()
            if waits:
                return b""
        words, self._waiting = self._waiting, b""
        return words

    def _passes_thoughts(self) -> bool:
        """Leave out thoughts. Returns whether more of them may come."""
        _, closing, after = self._waiting.partition(self._closing)
        if not closing:
            self._waiting = self._waiting[-len(self._closing) :]
            return True
        self._waiting, self._inside, self._past = after, None, True
        return False

    def _passes_mark(self) -> bool:
        """Leave out a mark. Returns whether one may have begun."""
        start = self._waiting.lstrip()
        marks = {self._opening: True, self._closing: None, self._aloud: False}
        for mark, inside in marks.items():
            if mark and start.startswith(mark):
                self._waiting, self._past = start[len(mark) :], True
                self._inside = inside
                return False
        if any(mark.startswith(start) for mark in marks if mark):
            return True
        self._inside = False
        if self._past:
            self._waiting = start
        return False
