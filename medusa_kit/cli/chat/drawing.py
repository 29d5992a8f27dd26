"""The tree that a step verified, drawn in ASCII."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from medusa_kit.infer.details import VerifiedTree


def drawing(tree: "VerifiedTree", texts: Sequence[str], width: int) -> str:
    """One line for each node, at most `width` columns wide, under a line that says what it is.
    `texts`: of the nodes' tokens."""
    children: list[list[int]] = [[] for _ in tree.parents]
    for node, parent in enumerate(tree.parents[1:], start=1):
        children[parent].append(node)
    kept = {0, *tree.accepted}
    # Quoted, so that spaces show and line breaks don't break the drawing.
    labels = [json.dumps(text, ensure_ascii=not text.isprintable()) for text in texts]
    labels = [f"* {label}" if node in kept else label for node, label in enumerate(labels)]
    verified = len(tree.parents) - 1
    said = f"{verified} draft token{'' if verified == 1 else 's'}, {len(tree.accepted)} accepted"
    lines = [f"{said} (*), after the model's own:", labels[0], *_below(0, "", children, labels)]
    return "\n".join([lines[0], *(_cut(line, width) for line in lines[1:])])


def _below(
    node: int, indent: str, children: Sequence[Sequence[int]], labels: Sequence[str]
) -> Iterator[str]:
    for child in children[node]:
        last = child == children[node][-1]
        yield f"{indent}{'`- ' if last else '|- '}{labels[child]}"
        yield from _below(child, indent + ("   " if last else "|  "), children, labels)


def _cut(line: str, width: int) -> str:
    if cell_len(line) <= width:
        return line
    return set_cell_size(line, max(width - 2, 0)) + ".."[:width]
