"""A captured forward that runs by the fused kernels, and the check of those at load.

Shapes: B rows of the cache, T nodes, N of a row at most, G key/value heads, E head dim.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base.model import relative_error
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.device.cache import FixedCache
from medusa_kit.infer.device.captured import CapturedForward, Model, Shape, fitting
from medusa_kit.infer.device.fused_forward import FusedForward, Nodes
from medusa_kit.infer.device.fused_model import EXACT, FusedModel
from medusa_kit.infer.device.fused_tiles import DEEPEST, MAX_SPLITS, num_splits
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.model_parts import Unsupported
from medusa_kit.infer.outputs import Outputs
from medusa_kit.infer.own_rounding import FAILURES, allowed_error, random_ids
from medusa_kit.infer.verifier import Forward, Verifier
from medusa_kit.no_gradients import no_gradients
from medusa_kit.tree.shape import Numbers, TreeShape, path_to

CHECKED_LENGTHS = (300, 11)  # of prompts: one whose prefix has several splits, one that is all tail
CHECKED_TREES = ((-1, 0, 0, 1, 2, 2), (-1, 0, 0, 1))


class FusedStep(CapturedForward):
    """Nodes go through the model one after another, and through attention too: nothing is padded.

    Raises RuntimeError for a cache that the kernels do not read.
    """

    def __init__(self, model: Model, cache: FixedCache, shape: Shape, fused: FusedForward) -> None:
        B, parts = len(cache.lengths), fused.model.parts
        super().__init__(model, cache, shape, model.base.hidden_and_logits, num_more=2 * B)
        self._pads, self._fused = False, fused
        self._firsts_B, self._counts_B = self._more_X.split(B)
        self._numbers_T = torch.arange(shape.num_nodes, device=self._more_X.device)
        block = cache.block_of(parts.kv_heads, parts.head_size, fused.model.output.weight_NK)
        if block is None or block.dtype != fused.model.dtype:
            raise RuntimeError("the KV cache is not stored as the fused kernels read it")
        if num_splits(shape.in_sight) > MAX_SPLITS:
            raise RuntimeError(f"{shape.in_sight} slots are more than the fused kernels read")

    def scores(self, forward: Forward) -> Outputs:
        """By the fused kernels, whatever the model's forward is."""
        base, cache, N = self._model.base, self._cache, self.shape.row_nodes
        assert cache.block is not None
        rows_T = self._padded_T // N
        lengths_T = self._lengths_B[rows_T]
        rows_T = rows_T.masked_fill(self._numbers_T >= self._counts_B.sum(), -1)
        positions_T = (lengths_T + self._depths_T).clamp_max(base.info.context_length - 1)
        nodes = Nodes(
            self._tokens_T, rows_T, lengths_T + self._padded_T % N, self._depths_T, positions_T,
            self._words_TW, self._firsts_B, self._counts_B, self._lengths_B, N, self.shape.in_sight,
        )  # fmt: skip
        hidden_TD, logits_TV = self._fused(nodes, cache.block)
        return Outputs(hidden_TD, base.scale_logits(logits_TV))

    def _numbers(self, nodes: Forest, rows: Sequence[int]) -> Numbers:
        firsts_counts = np.zeros((2, len(self._cache.lengths)), np.int64)
        counts = np.array(nodes.counts)
        firsts_counts[0, list(rows)] = np.cumsum(counts) - counts
        firsts_counts[1, list(rows)] = counts
        return np.concatenate([super()._numbers(nodes, rows), firsts_counts.ravel()])


def ancestors_in_place(shapes: Sequence[TreeShape]) -> bool:
    """Whether what attention reads as prefix lies where it will stay: trees that are deeper than a
    tail begin as a chain."""
    return all(_begins_as_chain(shape.depths_N) for shape in shapes)


def _begins_as_chain(depths_N: Numbers) -> bool:
    above = int(depths_N.max()) - DEEPEST
    if above <= 0:
        return True
    is_first = np.array_equal(depths_N[:above], np.arange(above))
    return is_first and int((depths_N < above).sum()) == above


def checked_fused(verifier: Verifier, mode: str) -> tuple[FusedForward | None, float]:
    """(the fused forward of a verifier's model, twice what rounding differs from torch's). Where
    there can be none, one line says why.
    """
    try:
        fused = FusedForward(FusedModel.of(verifier.base), mode == EXACT)
        rounding = check_fused(verifier, fused)
    except (Unsupported, IncompatibleBaseError, *FAILURES) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        console.note(f"steps run by torch's own kernels: {reason}")
        return None, 0.0
    if mode == EXACT and not gives_same_bits(verifier, fused):
        console.note("draft tokens and text differ by rounding on this device")
    return fused, rounding


def check_fused(verifier: Verifier, fused: FusedForward) -> float:
    """Compare the fused forward with the model's own on trees; returns twice what rounding differs.

    Raises IncompatibleBaseError where the two differ by more than rounding.
    """
    cache, nodes = _checked_nodes(verifier)
    rows = range(len(nodes.shapes))
    plain_NV = Verifier.score(verifier, cache, nodes, rows).logits_NV
    fused_NV = _fused_logits(verifier, fused, cache, nodes, rows)
    error = relative_error(fused_NV, plain_NV)
    allowed = allowed_error(verifier.base, error)
    if not error <= allowed:
        raise IncompatibleBaseError(
            f"the fused forward of {verifier.base.info.name!r} is off by {error:.1e} of the spread "
            f"of its logits (allowed {allowed:.0e})"
        )
    return 2 * float((fused_NV.double() - plain_NV.double()).abs().max())


def gives_same_bits(verifier: Verifier, fused: FusedForward) -> bool:
    """Whether a draft token of a tree gets the bits that it gets as text, read alone."""
    cache, nodes = _checked_nodes(verifier)
    tree_NV = _fused_logits(verifier, fused, cache, nodes, range(len(nodes.shapes)))
    parents, tokens = CHECKED_TREES[0], nodes.token_lists()[0]
    for node in path_to(len(parents) - 1, parents):
        text = Forest.chains([[tokens[node]]], verifier.base.device)
        alone_1V = _fused_logits(verifier, fused, cache, text, [0])
        if not torch.equal(alone_1V[0], tree_NV[node]):
            return False
        cache.commit([[0]], [0])
    return True


@no_gradients
def _fused_logits(
    verifier: Any, fused: FusedForward, cache: FixedCache, nodes: Forest, rows: Sequence[int]
) -> Tensor:
    shape = Shape(*fitting(nodes.counts, len(cache.lengths)), cache.num_positions)
    step = FusedStep(verifier, cache, shape, fused)
    step.send(nodes, rows)
    return step.replay(sum(nodes.counts)).logits_NV


def _checked_nodes(verifier: Verifier) -> tuple[FixedCache, Forest]:
    """Random trees after random prompts in a new cache."""
    base, generator = verifier.base, torch.Generator().manual_seed(0)
    longest = base.info.context_length - len(CHECKED_TREES[0])
    prompts = [random_ids(base, min(size, longest), generator) for size in CHECKED_LENGTHS]
    cache = verifier.new_cache(len(prompts), base.info.context_length)
    assert isinstance(cache, FixedCache)
    verifier.read_prompts(cache, range(len(prompts)), prompts)
    trees = [random_ids(base, len(parents), generator) for parents in CHECKED_TREES]
    return cache, Forest.of(trees, CHECKED_TREES, base.device)
