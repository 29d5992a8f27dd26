"""Memory that is full in the middle of torch's work."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Full(TorchDispatchMode):
    """Raises at the given operation of torch, once."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__()
        self.left, self.error = at, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return func(*args, **(kwargs or {}))
