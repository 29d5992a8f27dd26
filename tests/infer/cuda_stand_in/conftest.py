"""Models are checked once, and few forwards are captured before they are needed."""

from support.captured_as_needed import captured_as_needed  # noqa: F401
from support.checked_once import checked_once  # noqa: F401
