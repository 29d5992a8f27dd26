"""Prompts read as nodes, so that their tokens have the bits that they would have as draft tokens,
however a prompt is cut and whatever is read beside it.

Shapes: B rows, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_kit.infer.device.captured import MAX_NODES
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.outputs import NodeScores, TextStates
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier


def read_as_nodes(
    verifier: Verifier,
    cache: TreeCache,
    rows: Sequence[int],
    pieces: Sequence[Sequence[int]],
    seen: dict[int, TextStates] | None,
) -> tuple[Tensor, Tensor]:
    """As `Verifier.read_prompts`, one row after another. What a call has committed before it fails
    is forgotten, so that it may be made again."""
    before = list(cache.lengths)
    ends = list[NodeScores]()
    try:
        for row, piece in zip(rows, pieces, strict=True):
            ends.append(_read_row(verifier, cache, row, piece, seen))
    except BaseException:
        for row in rows:
            cache.keep_first(row, before[row])
        raise
    hidden_BD = torch.cat([scores.hidden_ND for scores in ends])
    return hidden_BD, torch.cat([scores.logits_NV for scores in ends])


def _read_row(
    verifier: Verifier,
    cache: TreeCache,
    row: int,
    piece: Sequence[int],
    seen: dict[int, TextStates] | None,
) -> NodeScores:
    """The scores after the last token."""
    states = list[TextStates]()
    for start in range(0, len(piece), MAX_NODES):
        tokens = piece[start : start + MAX_NODES]
        scores = verifier.score(cache, Forest.chains([tokens], verifier.base.device), [row])
        cache.commit([range(len(tokens))], [row])
        states += [TextStates(scores.hidden_ND, None)] if seen is not None else []
    if seen is not None:
        seen[row] = TextStates.joined(states)
    return NodeScores(scores.hidden_ND[-1:].clone(), scores.logits_NV[-1:].clone())
