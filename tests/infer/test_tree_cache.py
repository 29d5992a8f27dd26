"""The tree cache against plain Python lists of what each row should hold."""

import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from medusa_kit.errors import ContextLengthError
from medusa_kit.infer.tree_cache import TreeCache

LAYERS, B, G, E, SLOTS = 3, 3, 2, 4, 64


def written(generator: torch.Generator, rows: int, nodes: int, size: int = E) -> torch.Tensor:
    return torch.randn(rows, G, nodes, size, generator=generator)


class Mirror:
    """Drives a cache and keeps, as lists, what it ought to hold: rows[layer][row] = [(k, v)]."""

    def __init__(self, value_sizes: list[int]) -> None:
        self.cache = TreeCache(LAYERS, B, SLOTS)
        self.value_sizes = value_sizes
        self.generator = torch.Generator().manual_seed(0)
        self.rows: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = [
            [[] for _ in range(B)] for _ in range(LAYERS)
        ]

    def step(self, nodes: int, kept: list[list[int]], rows: list[int] | None = None) -> None:
        """`rows`: whose nodes they are, all rows' unless given."""
        new, rows = [], list(range(B)) if rows is None else rows
        lengths = [self.cache.lengths[row] for row in rows]
        with self.cache.using(rows):
            for layer, size in enumerate(self.value_sizes):
                keys = written(self.generator, len(kept), nodes)
                values = written(self.generator, len(kept), nodes, size)
                seen_keys, seen_values = self.cache.update(keys, values, layer)
                assert seen_keys.shape[2] == seen_values.shape[2] == max(lengths) + nodes
                for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                    fresh = [(keys[at, :, n], values[at, :, n]) for n in range(nodes)]
                    self._assert_row(self.rows[layer][row] + fresh, seen_keys[at], seen_values[at])
                    assert length == len(self.rows[layer][row])
                new.append((keys, values))
        for layer, (keys, values) in enumerate(new):
            for at, (row, kept_nodes) in enumerate(zip(rows, kept, strict=True)):
                self.rows[layer][row] += [
                    (keys[at, :, n].clone(), values[at, :, n].clone()) for n in kept_nodes
                ]
        self.cache.commit(kept, rows)

    def _assert_row(self, expected: list, keys: torch.Tensor, values: torch.Tensor) -> None:
        for slot, (key, value) in enumerate(expected):
            assert torch.equal(keys[:, slot], key)
            assert torch.equal(values[:, slot], value)


@pytest.mark.parametrize(
    "value_sizes", [[E, E, E], [E, E, 6]], ids=["one block", "one layer of another shape"]
)
@torch.inference_mode()  # as decoding runs
def test_every_slot_holds_what_was_committed(value_sizes: list[int]) -> None:
    mirror = Mirror(value_sizes)
    mirror.step(5, [[0, 1, 2, 3, 4], [0, 1, 2], [0]])  # prompts of different length
    mirror.step(6, [[0, 2, 5], [0], [0, 1, 4]])
    mirror.step(1, [[0], [0], [0]])
    mirror.step(6, [[0, 3], [0, 1, 2, 5]], [2, 0])
    mirror.step(4, [[0, 1], [0, 3]], [2, 0])
    mirror.step(5, [[0, 1, 2, 3, 4], [0, 4]], [1, 2])  # side by side
    mirror.step(7, [[0, 6]], [0])
    mirror.step(1, [[0], [0], [0]])


@torch.inference_mode()
def test_random_walks() -> None:
    draw = random.Random(0)
    mirror = Mirror([E, E, E])
    for _ in range(8):
        nodes = draw.randint(1, 7)
        deeper = [sorted(draw.sample(range(1, nodes), draw.randint(0, nodes - 1)))
                  for _ in range(B)]  # fmt: skip
        mirror.step(nodes, [[0, *more] for more in deeper])


def test_keys_never_move_to_new_memory() -> None:
    cache = TreeCache(1, 1, SLOTS)
    first, _ = cache.update(torch.ones(1, G, 5, E), torch.ones(1, G, 5, E), 0)
    cache.commit([[0, 1, 4]])
    again, _ = cache.update(torch.ones(1, G, 3, E), torch.ones(1, G, 3, E), 0)
    assert first.data_ptr() == again.data_ptr()


def test_no_room_is_said_before_anything_is_written() -> None:
    cache = TreeCache(1, 2, 8)
    cache.update(torch.ones(2, G, 6, E), torch.ones(2, G, 6, E), 0)
    cache.commit([[0, 1, 2, 3, 4, 5], [0]])
    cache.check_room(2)
    with pytest.raises(ContextLengthError, match="3 nodes after 6 tokens"):
        cache.check_room(3)


@torch.inference_mode()
def test_growing_keeps_what_was_committed_and_adds_zeros() -> None:
    cache, generator = TreeCache(LAYERS, 2, 8), torch.Generator().manual_seed(0)
    keys, values = written(generator, 2, 5), written(generator, 2, 5)
    cache.check_room(5)
    for layer in range(LAYERS):
        cache.update(keys, values, layer)
    cache.commit([[0, 1, 2, 3, 4], [0]])
    cache.grow(5000, 3)
    block = cache.block
    assert block is not None
    assert block.shape[2:5] == (3, G, 5000)
    assert cache.lengths == [5, 1, 0]
    assert torch.equal(block[0, 0, 0, :, :5], keys[0])
    assert torch.equal(block[0, 1, 1, :, :1], values[1, :, :1])
    assert not block[:, :, :, :, 5:].any()
    assert not block[:, :, 2].any()


@torch.inference_mode()
def test_a_place_given_to_another_row_holds_nothing_that_was_not_accepted() -> None:
    cache = TreeCache(LAYERS, 2, SLOTS)
    nan = torch.full((2, G, 6, E), torch.nan)
    cache.check_room(6)
    for layer in range(LAYERS):
        cache.update(nan, nan, layer)
    cache.commit([[0], [0, 1]])
    cache.keep_first(0, 0)
    cache.copy_first(0, 1, 0)
    assert cache.block is not None
    assert not cache.block.isnan().any()
    cache.check_room(2)  # and again, where it has been zeroed before
    for layer in range(LAYERS):
        cache.update(nan[:, :, :2], nan[:, :, :2], layer)
    cache.keep_first(0, 0)
    cache.keep_first(1, 0)
    assert not cache.block.isnan().any()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux to count threads")
def test_moving_slots_wakes_no_thread_of_torch() -> None:
    """Such threads go on spinning for a while, on a core that the next step in C++ waits for."""
    program = """
        import os, torch
        from medusa_kit.infer.tree_cache import TreeCache
        torch.set_num_threads(2)
        cache = TreeCache(30, 1, 64)
        cache.block_of(3, 64)
        cache.lengths = [20]
        cache.reach([0], [8])
        before = len(os.listdir("/proc/self/task"))
        cache.commit([[0, 2, 5]])
        print(len(os.listdir("/proc/self/task")) - before)
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "0"
