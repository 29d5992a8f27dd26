"""`medusa-kit cache`: what is kept on disk from one run to the next, and how to get rid of it."""

import datetime
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_kit import console
from medusa_kit.errors import WriteError, unknown_value

if TYPE_CHECKING:
    from medusa_kit.store.kept import Kept

ALL, GONE = "all", "gone"
COLUMNS = ("kind", "size", "last used", "source", "of")
SOURCE = {True: "there", False: "gone", None: "–"}

Clear = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="Remove all of it, a kind as in the table, or gone: what was made of files that are "
        "gone.",
    ),
]


def cache(clear: Clear = None) -> None:
    """Show what is kept on disk: of which model, its size, and whether its source is still there.

    The folder is MEDUSA_KIT_CACHE, else XDG_CACHE_HOME/medusa-kit, else ~/.cache/medusa-kit. All of
    it is made anew where it is needed again. Whatever else lies there is left alone.
    """
    from medusa_kit.store.kept import everything_kept

    left = _clear(clear) if clear is not None else []
    _show(everything_kept())
    if left:
        raise WriteError(
            f"{len(left)} of what was to be removed stays: {left[0]}",
            hint="try again when no other process is at it, as a user who may write there",
        )


def _clear(what: str) -> Sequence[object]:
    from medusa_kit.store.clearing import clear, clear_left_behind
    from medusa_kit.store.kept import KINDS, everything_kept

    if what not in (known := (ALL, GONE, *KINDS)):
        raise unknown_value("--clear", what, known)
    chosen = [
        kept
        for kept in everything_kept()
        if what in (ALL, kept.kind) or (what == GONE and kept.source_exists is False)
    ]
    if what == ALL:
        clear_left_behind()
    removed, left = clear(chosen)
    size = _total(kept for kept in chosen if not {*kept.paths} & {*left})
    console.note(f"removed {len(removed)} files and folders, {_shown_size(size)}")
    return left


def _show(items: "Sequence[Kept]") -> None:
    from medusa_kit.store.records import cache_folder

    rows = [COLUMNS]
    for kept in items:
        day = datetime.datetime.fromtimestamp(kept.used).date().isoformat()
        of = "–" if kept.place is None else kept.place[1]
        source = SOURCE[kept.source_exists]
        rows.append((kept.kind, _shown_size(kept.size), day, source, of))
    rows.append(("in all", _shown_size(_total(items)), "", "", str(cache_folder())))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        typer.echo("  ".join([*cells, _printable(row[-1])]))


def _total(items: "Iterable[Kept]") -> int:
    """Bytes, a file with several names counted once."""
    files: dict[tuple[int, int], int] = {}
    for kept in items:
        files |= kept.files
    return sum(files.values())


def _shown_size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _printable(name: str) -> str:
    """A name in one line: one that is no text, or has signs for terminals, as Python writes it."""
    return name if name.isprintable() else ascii(name)
