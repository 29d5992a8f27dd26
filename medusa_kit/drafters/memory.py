"""What drafters keep between the requests of an engine: tables, past answers, draft models."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from medusa_kit.locks import SharedLock

T = TypeVar("T")


class Memory:
    """Requests in several threads share it, so what lies in it locks itself."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._lock = SharedLock()

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What an earlier request left under `key`, else made now, by one thread alone."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
            return cast(T, self._kept[key])

    def __len__(self) -> int:
        return len(self._kept)
