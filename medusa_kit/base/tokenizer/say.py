"""Notes that are told once."""

import functools

from medusa_kit import console


@functools.cache
def say(line: str) -> None:
    """A note on stderr, once: `verify` loads a base twice, to hold one against the other."""
    console.note(line)
