"""Looks for strings of bytes in bytes that come bit by bit (Knuth, Morris and Pratt)."""

from collections.abc import Sequence


class ByteSearch:
    """`push` bytes as they come; each is looked at once for each of the words."""

    def __init__(self, words: Sequence[bytes]) -> None:
        self._words = [(word, _shorter_beginnings(word)) for word in words]
        self._begun = [0] * len(words)  # bytes at the end that begin each word
        self.size = 0  # bytes so far

    @property
    def begun(self) -> int:
        """How many bytes at the end may be the beginning of a word."""
        return max(self._begun)

    def push(self, data: bytes) -> int | None:
        """Where the first of the words begins that is complete by now; no more may follow it."""
        first = None
        for index, (word, _) in enumerate(self._words):
            if (end := self._end(index, data)) is not None:
                start = self.size + end - len(word)
                first = start if first is None else min(first, start)
        self.size += len(data)
        return first

    def _end(self, index: int, data: bytes) -> int | None:
        """After how many of these bytes the word is complete."""
        word, shorter = self._words[index]
        begun = self._begun[index]
        if not begun and word[0] not in data:  # most often, and fast
            return None
        for end, byte in enumerate(data, start=1):
            while begun and byte != word[begun]:
                begun = shorter[begun]
            begun += byte == word[begun]
            if begun == len(word):
                return end
        self._begun[index] = begun
        return None


def _shorter_beginnings(word: bytes) -> list[int]:
    """For each length: the longest shorter beginning of the word that ends its first so many
    bytes."""
    shorter, size = [0, 0], 0
    for byte in word[1:]:
        while size and byte != word[size]:
            size = shorter[size]
        size += byte == word[size]
        shorter.append(size)
    return shorter
