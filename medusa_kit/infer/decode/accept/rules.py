"""Acceptance rules: which of the drafted nodes to keep, and which token follows them.

Exact: the base model names a token at each node, and the walk goes on while a child has it.
Whatever is proposed, the tokens named are those of plain decoding; a wrong draft token costs only
time. Greedy decoding names the likeliest token, exact sampling draws one; `choose` does either.

Typical acceptance (arXiv 2401.10774, §2.3.1) is lossy: every draft token that the base model finds
likely enough counts as its own, and the longest path of such tokens is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa_kit.tree.shape import shape_of


def _always(_: int) -> bool:
    return True


def accept(
    tokens: Sequence[int],
    parents: Sequence[int],
    choose: Callable[[int], int],
    max_depth: int,
    scored: Callable[[int], bool] = _always,
) -> tuple[list[int], int]:
    """Walk from the root: (accepted nodes without the root, the token that follows the last one).

    `choose(node)` names the token after `node`. It is called once for each node of the path.
    `max_depth`: nodes deeper than this lie past the context's end and cannot be accepted.
    `scored(node)`: whether a token can be named after it; where not, it is not accepted. Its token
    is the next root then, which is scored again.
    """
    children, node, path = shape_of(tuple(parents)).children, 0, list[int]()
    while True:
        token = choose(node)
        for child in children[node]:
            if tokens[child] == token:
                break
        else:
            return path, token
        if len(path) == max_depth or not scored(child):
            return path, token
        path.append(child)
        node = child


@dataclass(frozen=True)
class Verdict:
    """The base model's log-probabilities of draft tokens after a node."""

    top_token: int  # its own next token
    log_probs: list[float]  # of the draft tokens
    bar: float  # a draft token passes above it

    def passing(self, guesses: Sequence[int]) -> dict[int, float]:
        """Those of `guesses` (nodes, in the order of `log_probs`) that pass, with their
        log-probabilities."""
        pairs = zip(guesses, self.log_probs, strict=True)
        return {node: log_prob for node, log_prob in pairs if log_prob > self.bar}


def accept_typical(
    tokens: Sequence[int],
    parents: Sequence[int],
    judge: Callable[[int, list[int]], Verdict],
    max_depth: int,
    scored: Callable[[int], bool] = _always,
) -> tuple[list[int], int]:
    """The longest path of passing draft tokens, the likeliest of several: (its nodes, what
    follows).

    What follows, the next root, is always the base model's likeliest token, as in the paper.
    `judge(node, tokens)` is called once for each passing node that has children, and for the last
    node of the path. `scored`: as in `accept`.
    """
    children = shape_of(tuple(parents)).children
    verdicts: dict[int, Verdict] = {}
    level, paths = {0: 0.0}, {0: list[int]()}  # passing nodes of one depth: log-probability, path
    for _ in range(max_depth):
        deeper: dict[int, float] = {}
        for node in level:
            if guesses := children[node]:
                verdicts[node] = judge(node, [tokens[guess] for guess in guesses])
                for guess, log_prob in verdicts[node].passing(guesses).items():
                    if not scored(guess):
                        continue
                    deeper[guess] = level[node] + log_prob
                    paths[guess] = [*paths[node], guess]
        if not deeper:
            break
        level = deeper
    last = max(level, key=lambda node: level[node])
    if last not in verdicts:
        verdicts[last] = judge(last, [])
    return paths[last], verdicts[last].top_token
