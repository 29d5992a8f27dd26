"""Room in a batch: how many slots its callers may need, how long these are, and which are given up.

All slots of a batch are as long as its longest request needs.
"""

from collections.abc import Callable, Sequence

from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.infer.decode.batch import GROWTH, MAX_SLOTS, Batch
from medusa_kit.infer.decode.caller import Caller
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import Request
from medusa_kit.infer.memory import cache_bytes_per_token
from medusa_kit.infer.verifier import Verifier


def rows_of(callers: Sequence[Caller]) -> int:
    """The requests that these may have in a batch at once."""
    return sum(caller.max_rows for caller in callers)


def positions_of(requests: Sequence[Request], verifier: Verifier, drafter: Drafter) -> int:
    """Tokens and nodes that the longest of them may come to have."""
    longest = max(request.num_positions for request in requests)
    return longest + verifier.positions_of_tree(drafter.num_nodes) - 1


def has_room(batch: Batch, caller: Caller, num_positions: int, alone: int) -> bool:
    """Whether room for a caller's requests takes little; in a batch that is used, no forward
    captured over its cache may be lost. `num_positions`: of its slots then; `alone`: of those in a
    batch of their own."""
    rows, count = rows_of([caller, *batch.callers]), len(batch.cache.lengths)
    slots, is_long_enough = max(rows, count), num_positions <= batch.cache.num_positions
    if not batch.callers:
        return is_long_enough or slots <= MAX_SLOTS * caller.max_rows
    if batch.verifier.captures:
        return is_long_enough and rows <= count
    if batch.verifier.base.device.type == "cpu":  # room that is not written to takes none
        return True
    room = slots * max(num_positions, batch.cache.num_positions)
    return room - count * batch.cache.num_positions <= MAX_SLOTS * caller.max_rows * alone


def make_room(batch: Batch, caller: Caller, num_positions: int, kept_bytes: int) -> bool:
    """Make it; longer slots than are needed, as far as the batch may be kept. Returns whether there
    is memory for that: a batch of the caller's own may take far less."""
    rows, count = rows_of([caller, *batch.callers]), len(batch.cache.lengths)
    positions, slots = batch.cache.num_positions, max(rows, count)
    if num_positions > positions:
        per_token = cache_bytes_per_token(batch.verifier.base, batch.verifier.num_layers)
        max_positions = kept_bytes // max(per_token * slots, 1)
        positions = max(num_positions, min(int(GROWTH * num_positions), max_positions))
    if (positions, slots) == (batch.cache.num_positions, count):
        return True
    return _has_memory(lambda: batch.resize(positions, slots))


def give_up_room(batch: Batch, kept_bytes: int) -> None:
    """Where a batch takes more than may be kept, give up what is too much, if there is memory to
    copy the rest: slots beyond those that its callers need; where it has none, older texts."""
    if batch.cache.num_bytes <= kept_bytes:
        return
    if batch.callers:
        _has_memory(lambda: batch.cut(rows_of(batch.callers)))
    elif batch.verifier.base.device.type == "cpu":
        _has_memory(lambda: batch.keep_newest(kept_bytes))


def _has_memory(work: Callable[[], None]) -> bool:
    """Whether there was memory for this work, which is done then."""
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
