"""What drafters keep between the requests of an engine: tables, past answers, draft models.

Engines around one base model, which differ in their heads, share what does not depend on heads.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from medusa_kit.errors import Live
from medusa_kit.locks import KeyedLocks

T = TypeVar("T")


class Kept(Live):
    """What is made once for each key. Shared by requests in several threads, so the objects in it
    lock themselves."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._making = KeyedLocks()

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What an earlier request stored under `key`, else what `make` returns in one thread. Who
        asks for another key does not wait for it."""
        if key not in self._kept:
            with self._making.of(key):
                if key not in self._kept:
                    self._kept[key] = make()
        return cast(T, self._kept[key])

    def __len__(self) -> int:
        return len(self._kept)


class Memory(Kept):
    """What one engine remembers: what its heads have to do with, and two kinds of what they have
    not.

    `loaded`: what files say, such as a draft model. `learned`: what texts have shown, such as past
    answers.
    """

    def __init__(self, loaded: Kept | None = None, learned: Kept | None = None) -> None:
        super().__init__()
        self.loaded = Kept() if loaded is None else loaded
        self.learned = Kept() if learned is None else learned

    def of_draft_model(self, number: int) -> "Memory":
        """The memory of the drafter inside a draft model with this number."""
        key = "inside", number
        return Memory(self.loaded.remembered(key, Kept), self.learned.remembered(key, Kept))

    def for_other_heads(self) -> "Memory":
        """The memory of an engine with other heads around the same base model."""
        return Memory(self.loaded, self.learned)

    def without_texts(self) -> "Memory":
        """The memory of an engine that has seen no text yet."""
        return Memory(self.loaded)
