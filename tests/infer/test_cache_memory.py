"""Keys and values take the memory of what has been written, not of the longest answer."""

from pathlib import Path

import pytest
import torch
from support.small_engines import reusing
from support.tiny_models import tiny_base

from medusa_kit.base.model_state import watch_of
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.lazy_zeros import lazy_zeros
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.sampling import SamplingParams

LAYERS, HEADS, SIZE, SLOTS = 4, 4, 64, 32_768
SHORT = 100
BYTES_A_SLOT = LAYERS * 2 * HEADS * SIZE * 4
RESERVED = SLOTS * BYTES_A_SLOT  # 268 MB a row
LITTLE = RESERVED // 20
STATM = Path("/proc/self/statm")
needs_statm = pytest.mark.skipif(not STATM.exists(), reason="memory is read from Linux's /proc")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(STATM.read_text().split()[1]) * 4096


def filled(rows: int = 1, tokens: int = SHORT) -> TreeCache:
    cache = TreeCache(LAYERS, rows, SLOTS)
    write(cache, tokens)
    return cache


def write(cache: TreeCache, tokens: int) -> None:
    rows = len(cache.lengths)
    for layer in range(LAYERS):
        ones = torch.ones(rows, HEADS, tokens, SIZE)
        cache.update(ones, ones, layer)
    cache.commit([range(tokens)] * rows)


@needs_statm
def test_many_slots_with_a_short_answer_take_its_memory():
    before = resident()
    cache = filled(rows=2)
    write(cache, 1)
    assert resident() - before < LITTLE
    assert 2 * SHORT * BYTES_A_SLOT <= cache.num_bytes < LITTLE


@needs_statm
def test_rows_are_copied_shortened_and_made_longer_without_touching_the_rest():
    cache = filled(rows=2)
    before = resident()
    cache.keep_first(0, 10)
    cache.copy_first(1, 0, SHORT)
    cache.take_row(1, filled(), 0, SHORT // 2)
    cache.grow(SLOTS + 1000, 3)
    assert cache.num_positions == SLOTS + 1000
    assert resident() - before < LITTLE
    assert cache.num_bytes < LITTLE
    assert cache.block is not None
    for row, length in enumerate((SHORT, SHORT // 2)):
        assert bool((cache.block[:, :, row, :, :length] == 1).all())
        assert not cache.block[:, :, row, :, length : length + 200].any()


def test_what_a_row_held_before_is_zeroed():
    cache = filled(tokens=40)
    cache.keep_first(0, 10)
    assert cache.block is not None
    assert not cache.block[:, :, 0, :, 10:60].any()
    cache.keep_first(0, 10)
    write(cache, 20)
    cache.keep_first(0, 5)
    assert not cache.block[:, :, 0, :, 5:60].any()


def test_a_batch_with_much_room_and_few_tokens_is_kept():
    """Its limit is one of memory, and room takes none."""
    verifier = Verifier(tiny_base("llama"))
    watch_of(verifier.base.own_model).is_handed_out = False  # its prefixes are kept at any end
    text = list(range(3, 40))
    many = (64 << 20) // (3 * 2 * 2 * 8 * 4)  # slots of a row: 64 MB
    scheduler, kept = reusing(verifier, 1 << 20), list[Batch]()
    for cached in (0, len(text) - 1):
        request = make_request(verifier, text, SamplingParams(), 2)
        request.max_new_tokens = many
        steps = scheduler.run([request], PlainDrafter(verifier.base.device))
        next(steps)
        steps.close()
        assert request.num_cached == cached
        (batch,) = scheduler.idle
        assert batch.cache.num_positions >= many
        assert batch.cache.num_bytes < 1 << 20
        kept.append(batch)
    assert kept[0] is kept[1]


def test_zeros_that_cannot_be_had_are_an_error_of_memory():
    with pytest.raises(MemoryError, match="could not be reserved"):
        lazy_zeros((1 << 50, 64), torch.float32, torch.device("cpu"))
