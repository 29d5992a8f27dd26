"""What drafters keep between the requests of an engine: tables, past answers, draft models."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from medusa_kit.locks import SharedLock

T = TypeVar("T")


class Memory:
    """Shared by requests in several threads, so the objects in it lock themselves."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._lock = SharedLock()

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What an earlier request stored under `key`, else what `make` returns in one thread."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
            return cast(T, self._kept[key])

    def __len__(self) -> int:
        return len(self._kept)
