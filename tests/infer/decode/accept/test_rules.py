"""The acceptance rules against a search over all paths."""

import random

import pytest

from medusa_kit.infer.decode.accept.rules import Verdict, accept, accept_typical
from medusa_kit.tree.shape import path_to


def longest_right_path(
    tokens: list[int], parents: list[int], named: list[int], max_depth: int
) -> list[int]:
    """The longest of all paths from the root whose nodes hold what their parents' logits name."""
    best: list[int] = []
    for node in range(len(parents)):
        path, here = [], node
        while here > 0:
            path.append(here)
            here = parents[here]
        path.reverse()
        right = all(tokens[child] == named[parents[child]] for child in path)
        if right and len(best) < len(path) <= max_depth:
            best = path
    return best


@pytest.mark.parametrize("seed", range(200))
def test_takes_the_longest_right_path(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(1, 12)
    parents = [-1, *(draw.randrange(node) for node in range(1, size))]
    taken: set[tuple[int, int]] = set()
    tokens = [0]
    for parent in parents[1:]:  # siblings hold different tokens
        token = draw.choice([t for t in range(20) if (parent, t) not in taken])
        taken.add((parent, token))
        tokens.append(token)
    # Half of the nodes name a child of theirs, if they have any.
    named = [draw.choice([tokens[c] for c in range(1, size) if parents[c] == node] or [0])
             if draw.random() < 0.7 else draw.randrange(20) for node in range(size)]  # fmt: skip
    max_depth = draw.choice([0, 1, 2, 99])
    asked: list[int] = []

    def choose(node: int) -> int:
        asked.append(node)
        return named[node]

    path, follower = accept(tokens, parents, choose, max_depth)
    assert path == longest_right_path(tokens, parents, named, max_depth)
    assert follower == named[path[-1] if path else 0]
    assert asked == [0, *path]  # each node once: a draw must not be made twice


@pytest.mark.parametrize("seed", range(200))
def test_typical_takes_the_longest_passing_path_and_of_those_the_likeliest(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(1, 14)
    parents = [-1, *(draw.choice([-2, *range(node)]) for node in range(1, size))]
    tokens = [draw.randrange(50) for _ in range(size)]
    log_probs = [-draw.random() for _ in range(size)]
    bars = [draw.choice([-2.0, -0.7, -0.4]) for _ in range(size)]  # by the node guessed after
    max_depth = draw.choice([0, 1, 2, 99])

    best: tuple[int, float] = (0, 0.0)
    winner = 0
    for node in range(1, size):
        path = path_to(node, parents)
        if path[0] == 0 and all(log_probs[n] > bars[parents[n]] for n in path[1:]):
            value = (len(path) - 1, sum(log_probs[n] for n in path[1:]))
            if value[0] <= max_depth and value > best:
                best, winner = value, node

    asked: list[int] = []

    def judge(node: int, guesses: list[int]) -> Verdict:
        asked.append(node)
        children = [n for n in range(size) if parents[n] == node]
        assert guesses in ([], [tokens[n] for n in children])
        return Verdict(100 + node, [log_probs[n] for n in children if guesses], bars[node])

    path, follower = accept_typical(tokens, parents, judge, max_depth)
    assert path == path_to(winner, parents)[1:]
    assert follower == 100 + winner
    assert len(asked) == len(set(asked))
