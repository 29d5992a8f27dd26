"""What follows from a tree's parents, held against walking up from each node."""

import random

import numpy as np
import pytest

from medusa_kit.tree.shape import TreeShape, chain, path_to, shape_of


def random_parents(size: int) -> tuple[int, ...]:
    draw = random.Random(size)
    return (-1, *(draw.randrange(node) for node in range(1, size)))


@pytest.mark.parametrize("size", [1, 2, 7, 63, 64, 65, 130])
def test_depths_and_ancestors(size: int) -> None:
    shape = TreeShape(random_parents(size))
    assert len(shape) == size
    expected_NN = np.zeros((size, size), bool)
    for node in range(size):
        path = path_to(node, shape.parents)
        assert shape.depths_N[node] == len(path) - 1
        expected_NN[node, path] = True
    assert shape.sees_NN.dtype == np.bool_
    assert np.array_equal(shape.sees_NN, expected_NN)
    assert shape.words_NW.shape == (size, -(-size // 64))
    for node in range(size):
        words = [int(word) % 2**64 for word in shape.words_NW[node]]
        seen = [j for j in range(size) if words[j // 64] >> j % 64 & 1]
        assert seen == path_to(node, shape.parents)


def test_the_same_shape_is_the_same_object() -> None:
    assert shape_of((-1, 0, 0)) is shape_of((-1, 0, 0))
    assert chain(3) is chain(3)
    assert chain(3).parents == (-1, 0, 1)
