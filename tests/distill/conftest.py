"""Models are checked once."""

from support.checked_once import checked_once  # noqa: F401
