"""A mutant in a tree of files: where its line is now, and the file with it changed."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.mutants.drawing import Mutant, changes_of


class Placed(NamedTuple):
    path: Path
    line: int
    text: str  # the whole file, changed


def place(mutant: Mutant, tree: Path) -> Placed | None:
    """In its own file, else in any file of the package that has a function of this name with this
    line: then of that function, whatever its class is called now. None: the line is gone."""
    own, suffix = tree / mutant.file, Path(mutant.file).suffix
    others = sorted((tree / "medusa_kit").rglob(f"*{suffix}"))
    if suffix != ".py":
        others = [one for end in (".h", ".cpp") for one in sorted(own.parent.rglob(f"*{end}"))]
    for path in [own, *(one for one in others if one != own)]:
        if path.is_file() and (placed := _in_file(mutant, path)):
            return placed
    return None


def _in_file(mutant: Mutant, path: Path) -> Placed | None:
    source = path.read_text(encoding="utf-8")
    if mutant.old not in source:
        return None
    name, old, new = mutant.function.rpartition(".")[2], mutant.old, mutant.new
    same = [one for one in changes_of(mutant.file, source) if (one.old, one.new) == (old, new)]
    exact = [one.line for one in same if one.function == mutant.function]
    alike = [one.line for one in same if one.function.rpartition(".")[2] == name]
    lines = sorted(set(exact or alike))
    if not lines:
        return None
    line = lines[min(mutant.occurrence, len(lines) - 1)]
    text = source.splitlines(keepends=True)
    text[line - 1] = text[line - 1].replace(old, new, 1)
    return Placed(path, line, "".join(text))
