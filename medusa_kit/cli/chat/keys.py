"""Keys that are typed while an answer comes do not show in it; the terminal keeps them for the next
line. Ctrl-C works as ever."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keys_unseen() -> Iterator[None]:
    """The terminal does not echo keys meanwhile, where it can be told so."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    try:
        typed = sys.stdin.fileno()
        usual = termios.tcgetattr(typed)
    except (OSError, ValueError, termios.error):  # a pipe, or no stdin
        yield
        return
    quiet = [*usual[:3], usual[3] & ~termios.ECHO, *usual[4:]]
    termios.tcsetattr(typed, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(typed, termios.TCSADRAIN, usual)
