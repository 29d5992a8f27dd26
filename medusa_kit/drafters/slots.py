"""Rows of a cache that a drafter has of its own: a request has the same one until it ends."""


class Slots:
    """Which slots are taken. They are numbered as they are first taken."""

    def __init__(self) -> None:
        self.count = 0
        self._free: list[int] = []

    @property
    def needs_new(self) -> bool:
        """Whether the next one is new."""
        return not self._free

    @property
    def num_taken(self) -> int:
        return self.count - len(self._free)

    def take(self) -> int:
        """A free slot; a new one, numbered `count` before, where none is free."""
        if self._free:
            return self._free.pop()
        self.count += 1
        return self.count - 1

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
