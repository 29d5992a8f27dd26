"""A clock for one module."""

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def own_time(
    patch: pytest.MonkeyPatch, *modules: ModuleType, **functions: Callable[..., Any]
) -> None:
    """Give these modules a `time` of their own. The real one belongs to all threads: a server's
    event loop that sees a false hour sleeps until it has come."""
    own = SimpleNamespace(**{**vars(time), **functions})
    for module in modules:
        patch.setattr(module, "time", own)
