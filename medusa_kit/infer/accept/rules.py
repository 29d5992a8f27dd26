"""Acceptance rules: which of the drafted nodes to keep, and which token follows them.

Exact: the base model names a token at each node; follow while a child holds it. Whatever is
proposed, the tokens named are those of plain decoding: a wrong guess costs time only. Greedy names
the likeliest token, exact sampling draws one (draw-and-match); both come as `choose`.

Guesses that were drawn at random may be accepted by multi-candidate rejection instead, at each node
(`accept_drawn`), which keeps the base model's distribution too and follows the drafter as often as
any rule.

Typical (arXiv 2401.10774, §2.3.1) is lossy: every guess that the base model finds likely enough is
as good as its own token, and the longest path of such guesses wins.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


def accept(
    tokens: Sequence[int],
    parents: Sequence[int],
    choose: Callable[[int], int],
    max_depth: int,
) -> tuple[list[int], int]:
    """Walk from the root: (accepted nodes without the root, the token that follows the last one).

    `choose(node)` names the token after `node`, called once a node, along the path only.
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


def accept_drawn(
    wanted_V: Tensor, drawn_V: Tensor, candidates: Sequence[int], uniforms: Sequence[float]
) -> tuple[int | None, Tensor]:
    """Multi-candidate rejection at one node: (the candidate accepted, what is left of the
    distribution).

    `wanted_V` is the distribution that the token must follow; the first candidate was drawn from
    `drawn_V`, each other one from what is left of it without those before. Where none is accepted
    the token must be drawn from the distribution returned, by noise that neither the candidates nor
    `uniforms`, a number from 0 to 1 for each candidate, depend on (arXiv 2302.01318, theorem 1; for
    several candidates arXiv 2305.09781, §4.3, without replacement as in arXiv 2402.12374, §3.2).
    """
    for candidate, uniform in zip(candidates, uniforms, strict=True):
        if uniform * float(drawn_V[candidate]) < float(wanted_V[candidate]):
            return candidate, wanted_V
        left_V = (wanted_V - drawn_V).clamp_min(0)
        if not (total := float(left_V.sum())):  # equal distributions but for rounding
            return candidate, wanted_V
        wanted_V = left_V / total
        drawn_V = drawn_V.clone()
        drawn_V[candidate] = 0
        if total := float(drawn_V.sum()):
            drawn_V /= total
    return None, wanted_V


@dataclass(frozen=True)
class Verdict:
    """What the base model says of guesses after a node, in log-probabilities."""

    likeliest: int  # its own next token
    log_probs: list[float]  # of the guesses asked about
    bar: float  # a guess passes above it

    def passing(self, guesses: Sequence[int]) -> dict[int, float]:
        """Those of `guesses` (nodes, in the order asked) that pass, with their log-probability."""
        pairs = zip(guesses, self.log_probs, strict=True)
        return {node: log_prob for node, log_prob in pairs if log_prob > self.bar}


def accept_typical(
    tokens: Sequence[int],
    parents: Sequence[int],
    judge: Callable[[int, list[int]], Verdict],
    max_depth: int,
) -> tuple[list[int], int]:
    """The longest path of passing guesses, among those the likeliest: (its nodes, what follows).

    What follows is the base model's likeliest token, the next root, which the paper takes greedily
    and unconditionally. `judge(node, tokens)` is called once for each passing node that has
    children, and for the last of the path.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    verdicts: dict[int, Verdict] = {}
    level, paths = {0: 0.0}, {0: list[int]()}  # passing nodes of one depth: log-probability, path
    for _ in range(max_depth):
        deeper: dict[int, float] = {}
        for node in level:
            if guesses := children.get(node):
                verdicts[node] = judge(node, [tokens[guess] for guess in guesses])
                for guess, log_prob in verdicts[node].passing(guesses).items():
                    deeper[guess] = level[node] + log_prob
                    paths[guess] = [*paths[node], guess]
        if not deeper:
            break
        level = deeper
    last = max(level, key=lambda node: level[node])
    if last not in verdicts:
        verdicts[last] = judge(last, [])
    return paths[last], verdicts[last].likeliest
