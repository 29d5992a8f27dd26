"""Few forwards are captured before they are needed."""

from support.captured_as_needed import captured_as_needed  # noqa: F401
