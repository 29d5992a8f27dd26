"""The acceptance rule: the base model names a token at each node; follow while a child holds it.

Whatever is proposed, the tokens named are those of plain decoding: a wrong guess costs time only.
Greedy names the likeliest token, exact sampling draws one (draw-and-match); both come as `choose`.
"""

from collections.abc import Callable, Sequence


def accept(
    tokens: Sequence[int],
    parents: Sequence[int],
    choose: Callable[[int], int],
    max_depth: int,
) -> tuple[list[int], int]:
    """Walk from the root: (accepted nodes without the root, the token that follows the last one).

    `choose(node)` names the token behind `node`, called once a node, along the path only.
    `max_depth`: nodes deeper than this lie past the context's end and cannot be accepted.
    """
    children = {(parent, tokens[node]): node for node, parent in enumerate(parents) if parent >= 0}
    node, path = 0, list[int]()
    while True:
        token = choose(node)
        child = children.get((node, token))
        if child is None or len(path) == max_depth:
            return path, token
        path.append(child)
        node = child
