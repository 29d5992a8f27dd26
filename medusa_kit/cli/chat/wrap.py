"""Lines of a stream that are broken between words.

What is written stays written, so a word is held back until it is known where it stands.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from unicodedata import category

from rich.cells import cell_len

Styled = tuple[str, str | None]  # text and its tint
# What no line begins with, and what none ends with, where lines may break without a space.
CLOSING = frozenset("、。，．・：；！？）］｝」』】〉》”’…ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ")
OPENING = frozenset("（［｛「『【〈《“‘")
JOINER, EMOJI_SELECTOR = "\u200d", "\ufe0f"
FIXED_SPACES = frozenset("\u00a0\u202f\u2007")
UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF))  # Thai, Lao, Burmese, Khmer
HANGUL = (0xAC00, 0xD7A3)  # wide, and written with spaces
TAB = 8


class WordWrap:
    """Push text in, and write what comes out; `finish` gives the rest.

    A line break takes the place of the spaces before a word that does not fit. A word longer than
    a line begins one and is broken where it ends.
    """

    def __init__(self, width: int) -> None:
        self.width = max(width, 1)
        self.column = 0  # behind what has come out
        self._line = 0  # columns since the last line break that came out; terminals add their own
        self._spaces: list[Styled] = []
        self._word: list[Styled] = []  # the part of it that is held back
        self._last = ""  # character of the word
        self._begins_line = False  # the word does, so that the rest of it need not be held back

    def resize(self, width: int) -> None:
        """The terminal has another width from now on, and has broken the line that stands there
        anew."""
        width = max(width, 1)
        if width != self.width:
            self.width, self.column = width, self._line and (self._line - 1) % width + 1

    def push(self, text: str, tint: str | None = None) -> list[Styled]:
        return joined(part for character in text for part in self._taken(character, tint))

    def finish(self) -> list[Styled]:
        """The text that was held back, without spaces that nothing follows."""
        return joined(self._ended(last=True))

    def _taken(self, character: str, tint: str | None) -> Iterator[Styled]:
        if character == "\n":
            yield from self._ended(last=True)
            self.column = self._line = 0
            yield "\n", None
        elif character.isspace() and character not in FIXED_SPACES:
            yield from self._ended()
            self._spaces.append((character, tint))
        else:
            if may_break(self._last, character):
                yield from self._ended()
            self._word.append((character, tint))
            self._last = character
            if self._begins_line or self.column == 0 or self._end() > self.width:
                yield from self._put()

    def _ended(self, last: bool = False) -> Iterator[Styled]:
        """The word, behind which a line may break. `last`: of a line."""
        if self._word:
            yield from self._put()
        self._last, self._begins_line = "", False
        if last:
            self._spaces = []

    def _put(self) -> Iterator[Styled]:
        """The word so far, which from now on cannot be moved: it fits, or it begins a line."""
        if not self._begins_line and self.column and self._end() > self.width:
            self._spaces, self.column, self._line = [], 0, 0
            yield "\n", None
        self._begins_line |= self.column == 0
        out = [*self._spaces, *self._word]
        self._spaces, self._word = [], []
        text = "".join(text for text, _ in out)
        self._line += columns(text, self._line)
        self.column = column_after(self.column, text, self.width)
        yield from out

    def _end(self) -> int:
        """The column behind the word if it is put on this line."""
        text = "".join(text for text, _ in (*self._spaces, *self._word))
        return self.column + columns(text, self.column)


def columns(text: str, start: int) -> int:
    """How many columns `text` takes from column `start` on, on a line without end."""
    column = start
    for character in text:
        column += TAB - column % TAB if character == "\t" else cells_of(character)
    return column - start


def cells_of(character: str) -> int:
    """The most columns that terminals give it: some have vowel signs and the selector of coloured
    emoji take one, others none."""
    if character == EMOJI_SELECTOR or category(character) == "Mc":
        return 1
    return cell_len(character)


def may_break(before: str, after: str) -> bool:
    """Whether a line may end between these characters of a word, of which the first may be none."""
    if not before or before == JOINER or not cell_len(after):
        return False
    anywhere = _stands_alone(before) or _stands_alone(after)
    return anywhere and before not in OPENING and after not in CLOSING


def _stands_alone(character: str) -> bool:
    code = ord(character)
    if any(low <= code <= high for low, high in UNSPACED):
        return True
    return cell_len(character) == 2 and not HANGUL[0] <= code <= HANGUL[1]


def column_after(column: int, text: str, width: int) -> int:
    """Where the cursor is once `text` has been written from `column` on."""
    for character in text:
        if character in "\r\n":
            column = 0
        elif character == "\t":
            column = min(column + TAB - column % TAB, width - 1)
        else:
            cells = cells_of(character)
            column = cells if column + cells > width else column + cells
    return column


def joined(parts: Iterable[Styled]) -> list[Styled]:
    """The parts, with neighbours of the same tint joined."""
    groups = groupby(parts, key=lambda part: part[1])
    return [("".join(text for text, _ in group), tint) for tint, group in groups]
