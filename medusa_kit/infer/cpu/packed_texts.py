"""Hidden states of whole texts through the C++ steps: several texts in a call, no logits.

Shapes: B rows, T tokens, N tokens of a call, D hidden.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import NativeDecoder
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.tree_cache import TreeCache

Span = tuple[int, int, int]  # a text: its row of the input, start, end


class Piece(NamedTuple):
    """A part of a text that is read in one call."""

    cache_row: int  # row of the cache
    before: int  # tokens of the text before it
    row: int  # of the input
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def calls_for(spans: Sequence[Span]) -> list[list[Piece]]:
    """The texts cut into calls that are full but for the last. A text that goes on in the next call
    keeps its row of the cache; others take the lowest that is free, so that long ones share two.
    """
    calls: list[list[Piece]] = []
    room = 0
    for row, start, end in spans:
        cache_row, at = -1, start
        while at < end:
            if not room:
                calls.append([])
                room = kernels.MAX_ROWS
            if cache_row < 0:
                taken = {piece.cache_row for piece in calls[-1]}
                cache_row = min(set(range(len(taken) + 1)) - taken)
            length = min(room, end - at)
            calls[-1].append(Piece(cache_row, at - start, row, at, at + length))
            at, room = at + length, room - length
    return calls


def hidden_of_texts(
    decoder: NativeDecoder,
    input_ids_BT: Tensor,
    spans: Sequence[Span],
    context_length: int,
    lock: AbstractContextManager[object] | None = None,
) -> Tensor:
    """hidden_BTD, zeros outside the texts. Those have the bits that they have one by one. `lock`:
    taken for each call."""
    calls, info = calls_for(spans), decoder.packed.info
    hidden_BTD = torch.zeros(*input_ids_BT.shape, info["hidden_size"], dtype=torch.float32)
    num_rows = max((piece.cache_row for call in calls for piece in call), default=0) + 1
    longest = max((end - start for _, start, end in spans), default=1)
    cache = TreeCache(info["num_layers"], num_rows, longest)
    for call in calls:
        texts = [input_ids_BT[piece.row, piece.start : piece.end].tolist() for piece in call]
        nodes, rows = Forest.chains(texts, input_ids_BT.device), [piece.cache_row for piece in call]
        before_N = np.repeat([piece.before for piece in call], nodes.counts)
        for piece in call:
            cache.lengths[piece.cache_row] = piece.before
        positions_N = np.minimum(before_N + nodes.depths_N, context_length - 1)
        with lock or nullcontext():
            hidden_ND = decoder.hidden_states(cache, nodes, positions_N, rows)
        cache.commit([range(piece.length) for piece in call], rows)
        parts = hidden_ND.split([piece.length for piece in call])
        for piece, hidden_LD in zip(call, parts, strict=True):
            hidden_BTD[piece.row, piece.start : piece.end] = hidden_LD
    return hidden_BTD
