"""How to get the package and what it may need: the one place that says so.

There is no package of this name on an index, and the repository has no public address yet.
"""

ADDRESS: str | None = None  # of the repository, once it has one


def extra(name: str) -> str:
    """The command that installs an extra, in a clone."""
    return f"pip install -e '.[{name}]' in your clone of medusa-kit"


def from_nothing() -> list[str]:
    """Commands that make the package ready to use."""
    clone = [] if ADDRESS is None else [f"git clone {ADDRESS} medusa-kit && cd medusa-kit"]
    return [*clone, "make install && . .venv/bin/activate"]
