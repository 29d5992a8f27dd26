"""A verifier whose steps run in C++, and what does not fit there through torch.

Shapes: B batch, N nodes with root, M of them kept.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.errors import ConfigError
from medusa_kit.infer.attention import install_tree_attention
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.attention.step import StepHolder
from medusa_kit.infer.chains.choice import checked_verifier
from medusa_kit.infer.cpu.binding.kernels import MAX_ROWS
from medusa_kit.infer.cpu.decoder import NativeDecoder, Watched, native_decoder
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.model_parts import Unsupported
from medusa_kit.infer.outputs import NodeScores, TextStates
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients
from medusa_kit.settings.engine import FLOAT32

WITHOUT = f"use --activations {FLOAT32}"
AGAIN = "or load the changed model from where it is saved"


def needed(activations: str, expected: str, reason: str, hint: str) -> ConfigError:
    return ConfigError(f"activations {activations} need {expected}; {reason}", hint=hint)


def refuse_large_trees(activations: str, num_nodes: int) -> None:
    """Raises ConfigError for a tree that is more than one C++ call takes: torch would compute it in
    another precision."""
    if activations != FLOAT32 and num_nodes > MAX_ROWS:
        reason = f"there is one of {num_nodes} nodes, root included"
        expected = f"trees of at most {MAX_ROWS} nodes"
        raise needed(activations, expected, reason, f"{WITHOUT}, or fewer nodes")


class NativeVerifier(Verifier):
    """The C++ decoder takes few rows over a cache of one shape, the model all others."""

    def __init__(
        self, base: BaseModel, native: NativeDecoder, attention: AttentionChoice | str = "auto"
    ) -> None:
        super().__init__(base, attention, f"C++ ({native.summary})")
        self.native = native
        self._copies = True

    def with_activations(self, activations: str) -> Self:
        """A verifier over the same base that multiplies quantised weights by numbers of this
        precision. Raises Unsupported where there are none."""
        verifier = self.copied()
        verifier.native = verifier.native.with_activations(activations)
        verifier.steps_run_by = f"C++ ({verifier.native.summary})"
        return verifier

    @property
    def activations(self) -> str:
        return self.native.activations

    @cached_property
    def _holder(self) -> StepHolder:
        """The whole model of a light base is loaded for what does not fit here, and checked."""
        if self.base.is_light:
            checked_verifier(self.base)
        return install_tree_attention(self.base.own_model)

    @property
    def pads(self) -> bool:
        return not self._runs_alone and super().pads

    @property
    def own_attention(self) -> str | None:
        return None if self._runs_alone else super().own_attention

    @property
    def _runs_alone(self) -> bool:
        """Whether there is no torch model beside the packed one by now."""
        return self.base.is_light and "_holder" not in vars(self)

    def windowed(self) -> list[Any]:
        if not self.base.is_light:
            return super().windowed()
        windows = self.native.packed.windows
        return [_Window(windows, layer) for layer, window in enumerate(windows) if window]

    @property
    def reads_packed_weights(self) -> bool:
        return self._copies

    def renew(self) -> None:
        """Pack the weights as they are now; where C++ cannot run the model as it is, torch does.
        Raises ConfigError for activations in whose precision torch cannot."""
        super().renew()
        if self.activations != FLOAT32:
            reason = "the model was changed after it was loaded"
            raise needed(self.activations, "the weights as loaded", reason, f"{WITHOUT}, {AGAIN}")
        try:
            self.native, self._copies = native_decoder(self.base), True
            self.steps_run_by = f"C++ ({self.native.summary})"
        except Unsupported as why:
            self.run_by_torch(str(why))

    def decoder_now(self) -> NativeDecoder | None:
        """The decoder, if steps run in C++ and its weights are those of the base as it is now."""
        return self.native if self._copies and self.number == self.base.number else None

    def run_by_torch(self, reason: str) -> None:
        self._copies, self.steps_run_by = False, f"torch ({reason})"

    def prompt_chunk(self, num_rows: int) -> int:
        chunk = super().prompt_chunk if not self._copies else self.native.prompt_chunk
        return chunk(num_rows)

    @no_gradients
    def score(self, cache: TreeCache, nodes: Forest, rows: Sequence[int]) -> NodeScores:
        """Score trees without padding; more nodes than one call takes go in several calls, whole
        rows in each."""
        if not self._takes(cache, max(nodes.counts)):
            return super().score(cache, nodes, rows)
        parts = [self._call(cache, part, part_rows) for part, part_rows in _calls(nodes, rows)]
        return parts[0] if len(parts) == 1 else NodeScores.joined(parts)

    def _read_pieces(
        self,
        cache: TreeCache,
        rows: Sequence[int],
        pieces: Sequence[Sequence[int]],
        seen: dict[int, TextStates] | None,
    ) -> tuple[Tensor, Tensor]:
        """Read pieces of prompts, all rows in one call where they fit in one."""
        nodes = Forest.chains(pieces, self.base.device)
        if not self._takes(cache, max(nodes.counts)):
            return super()._read_pieces(cache, rows, pieces, seen)
        ends = list[NodeScores]()
        for part, part_rows in _calls(nodes, rows):
            ends_M = torch.tensor(list(accumulate(part.counts))) - 1
            whole = list[TextStates]()
            ends.append(self._call(cache, part, part_rows, ends_M, whole))
            if seen is not None and whole:
                seen.update(zip(part_rows, whole[0].split(part.counts), strict=True))
        cache.commit([range(count) for count in nodes.counts], rows)
        end = ends[0] if len(ends) == 1 else NodeScores.joined(ends)
        return end.hidden_ND, end.logits_NV

    def _takes(self, cache: TreeCache, num_nodes: int) -> bool:
        """Whether C++ takes rows of so many nodes. Raises ConfigError where it does not, and the
        model would compute them in another precision."""
        takes = self._copies and self.native.takes(cache, num_nodes)
        if not takes:
            refuse_large_trees(self.activations, num_nodes)
            assert self.activations == FLOAT32, "a cache of this verifier's has one shape"
        return takes

    def _call(
        self,
        cache: TreeCache,
        nodes: Forest,
        rows: Sequence[int],
        keep_M: Tensor | None = None,
        whole: list[TextStates] | None = None,
    ) -> NodeScores:
        """The scores of one C++ call. `whole`: gets the outputs of watched layers at all nodes."""
        lengths = [cache.lengths[row] for row in rows]
        cache.check_room_for(lengths, nodes.counts)
        before_N = np.repeat(np.array(lengths), nodes.counts)
        positions_N = np.minimum(before_N + nodes.depths_N, self.base.info.context_length - 1)
        watched = Watched(self.watched) if self.watched else None
        with self.lock():
            hidden, logits, ranked = self.native.score(
                cache, nodes, positions_N, rows, keep_M, watched
            )
        if watched is None:
            return NodeScores(hidden, logits, ranked)
        layers_NX = watched.outputs_NLD.flatten(1)
        if whole is not None:
            whole.append(TextStates(None, layers_NX))
        layers_MX = layers_NX if keep_M is None else layers_NX[keep_M]
        return NodeScores(hidden, logits, ranked, layers_NX=layers_MX)


class _Window:
    """A layer's window as a module has it."""

    def __init__(self, windows: list[int], layer: int) -> None:
        self._windows, self._layer = windows, layer

    @property
    def sliding_window(self) -> int:
        return self._windows[self._layer]

    @sliding_window.setter
    def sliding_window(self, window: int) -> None:
        self._windows[self._layer] = window


def _calls(nodes: Forest, rows: Sequence[int]) -> Iterator[tuple[Forest, Sequence[int]]]:
    """The nodes and rows of each call, in as few calls as take them, in order."""
    if sum(nodes.counts) <= MAX_ROWS:
        yield nodes, rows
        return
    first = 0
    while first < len(rows):
        last, total = first, 0
        while last < len(rows) and total + nodes.counts[last] <= MAX_ROWS:
            total += nodes.counts[last]
            last += 1
        yield nodes.of_trees(first, last), rows[first:last]
        first = last
