"""A candidate tree drawn as text.

Shapes: N nodes with root.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

from medusa_kit.errors import TreeError
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.plan import Tree

WIDTH = 100


def render_tree(
    tree: CandidateTree,
    values: Sequence[float] | None = None,
    tokens: Sequence[str] | None = None,
) -> str:
    """One line for each node: its rank, then its value (0 to 1) in percent and its token, if given.

    `values` and `tokens` hold N entries in the tree's order, the root first. Sibling leaves share
    lines of up to WIDTH columns. Raises TreeError when their number is not N.
    """
    for name, given in (("values", values), ("tokens", tokens)):
        if given is not None and len(given) != tree.num_nodes:
            raise TreeError(
                f"{len(given)} {name} for a tree of {tree.num_nodes} nodes, root included"
            )
    labels = [_label(tree, node, values, tokens) for node in range(tree.num_nodes)]
    return "\n".join([labels[0], *_lines_below(tree, 0, "", labels)])


def describe_tree(tree: Tree) -> str:
    """A drawing of a static tree, or a description of a dynamic one."""
    if isinstance(tree, CandidateTree):
        return render_tree(tree)
    return (
        f"a dynamic tree of {tree.num_nodes} nodes, up to depth {tree.depth}: at each step the "
        "paths that the heads find most probable"
    )


def _label(
    tree: CandidateTree,
    node: int,
    values: Sequence[float] | None,
    tokens: Sequence[str] | None,
) -> str:
    # The root is certain, so its value is always 100%.
    parts = [str(tree.ranks[node])] if node else ["root"]
    if values is not None and node:
        parts.append(f"{values[node]:.1%}")
    if tokens is not None:
        # Quoted, so that spaces show and line breaks don't break the drawing.
        parts.append(json.dumps(tokens[node], ensure_ascii=False))
    if not node:
        nodes = "1 node" if tree.num_nodes == 1 else f"{tree.num_nodes} nodes"
        parts.append(f"({nodes}, depth {tree.depth})")
    return " ".join(parts)


def _lines_below(tree: CandidateTree, node: int, indent: str, labels: list[str]) -> Iterator[str]:
    branches = list(_branches(tree, node, indent, labels))
    for place, (text, child) in enumerate(branches):
        last = place == len(branches) - 1
        yield f"{indent}{'└── ' if last else '├── '}{text}"
        if child is not None:
            yield from _lines_below(tree, child, indent + ("    " if last else "│   "), labels)


def _branches(
    tree: CandidateTree, node: int, indent: str, labels: list[str]
) -> Iterator[tuple[str, int | None]]:
    """(text, node to continue below, if any) of each branch: an inner node or a line of leaves."""
    for inner, run in groupby(tree.children(node), key=lambda child: bool(tree.children(child))):
        if inner:
            yield from ((labels[child], child) for child in run)
        else:
            width = WIDTH - len(indent) - len("├── ")
            yield from ((line, None) for line in _wrapped([labels[leaf] for leaf in run], width))


def _wrapped(labels: list[str], width: int) -> Iterator[str]:
    """Labels joined by dots into lines of at most `width`; a longer label gets its own line."""
    line = labels[0]
    for label in labels[1:]:
        if len(line) + len(" · ") + len(label) > width:
            yield line
            line = label
        else:
            line += f" · {label}"
    yield line
