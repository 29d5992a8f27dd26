"""A disk that is full, for what writes to it."""

import errno
from typing import Any


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")
