"""The verifier of models that carry a state: one chain of draft tokens a row, no trees.

Siblings would follow one another in such a model. So of a tree the likeliest path is taken.

Shapes: B batch, N nodes with root, M of them scored, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.chains.cache import ChainCache
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.outputs import NodeScores, Outputs, TextStates
from medusa_kit.infer.tree_cache import TreeCache, TreeCacheLayer
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients
from medusa_kit.transfer import to_device
from medusa_kit.tree.shape import chain

# Tokens that are read again in front of a chain, at most; more are read in a forward of their own.
MAX_UNREAD = 8
CHAINS = ", one chain of draft tokens a request"  # in statistics


class ChainVerifier(Verifier):
    """Scores chains after a kept state. Rows with as many tokens to read share a forward: padding
    would enter their states."""

    chains_only = True

    def __init__(
        self,
        base: BaseModel,
        attention: AttentionChoice | str = "auto",
        steps_run_by: str = "torch",
    ) -> None:
        super().__init__(base, attention, f"{steps_run_by}{CHAINS}")

    @cached_property
    def num_layers(self) -> int:
        """Layers with keys and values; the others have states alone."""
        return sum(isinstance(layer, TreeCacheLayer) for layer in self.new_cache(1, 0).layers)

    def new_cache(self, batch_size: int, num_positions: int) -> ChainCache:
        config = self.base.config
        if config.model_type == "minimax":
            from medusa_kit.infer.chains.minimax import LightningCache  # imports the model's code

            return LightningCache(config, batch_size, num_positions, self.cache_dtype)
        return ChainCache(config, batch_size, num_positions, self.cache_dtype)

    def fitted(self, draft: Forest) -> Forest:
        """The draft with the first path of each row's tree: at each node its first child, the
        likeliest one where drafters put these in order."""
        draft = super().fitted(draft)
        paths, first, kept = [_first_path(shape.parents) for shape in draft.shapes], 0, list[int]()
        for path, count in zip(paths, draft.counts, strict=True):
            kept += [first + node for node in path]
            first += count
        if len(kept) == first:
            return draft
        tokens_N = draft.tokens_N[to_device(kept, draft.tokens_N.device)]
        return replace(draft, tokens_N=tokens_N, shapes=[chain(len(path)) for path in paths])

    @no_gradients
    def score(self, cache: TreeCache, nodes: Forest, rows: Sequence[int]) -> NodeScores:
        assert isinstance(cache, ChainCache)
        late = [row for row in rows if len(cache.unread[row]) > MAX_UNREAD]
        if late:
            self._read(cache, late, [[] for _ in late], 1)
            cache.commit([[] for _ in late], late)
        read = self._read(cache, rows, nodes.token_lists(), max(nodes.counts))
        return NodeScores.of(Outputs.joined(read))

    def _read_pieces(
        self,
        cache: TreeCache,
        rows: Sequence[int],
        pieces: Sequence[Sequence[int]],
        seen: dict[int, TextStates] | None,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(cache, ChainCache)
        texts = {row: list(piece) for row, piece in zip(rows, pieces, strict=True)}
        firsts = {row: cache.before_mark(row, len(text)) for row, text in texts.items()}
        before: dict[int, TextStates] | None = None if seen is None else {}
        if divided := {row: texts[row][:first] for row, first in firsts.items() if first}:
            self._read(cache, list(divided), list(divided.values()), 1, before)
            cache.commit(list(divided.values()), list(divided))
            # Where their pieces began stays known: what follows may fail, and be read again.
            cache.keep_state(list(divided))
        remaining = [texts[row][firsts[row] :] for row in rows]
        read = self._read(cache, rows, remaining, 1, seen)
        if seen is not None:
            for row, states in (before or {}).items():
                seen[row] = TextStates.joined([states, seen[row]])
        cache.commit(remaining, rows)
        cache.end_prompt(rows)
        ends = Outputs.joined([outputs.each(lambda part: part[-1:]) for outputs in read])
        return ends.hidden, ends.logits

    def _read(
        self,
        cache: ChainCache,
        rows: Sequence[int],
        chains: Sequence[list[int]],
        max_scored: int,
        seen: dict[int, TextStates] | None = None,
    ) -> list[Outputs]:
        """The outputs at each row's new tokens, at least at the last `max_scored`; its unread ones
        are read in front of them. `seen`: gets the states at all that each row reads."""
        whole: list[TextStates] | None = None if seen is None else []
        texts = [[*cache.unread[row], *chain] for row, chain in zip(rows, chains, strict=True)]
        found = dict[int, Outputs]()
        for indices in _alike([cache.lengths[row] > 0 for row in rows], texts):
            own_rows = [rows[index] for index in indices]
            own_texts = [texts[index] for index in indices]
            outputs = self._forward(cache, own_rows, own_texts, max_scored, whole)
            if seen is not None and whole is not None:
                seen.update(
                    zip(own_rows, whole.pop().split(list(map(len, own_texts))), strict=True)
                )
            for position, index in enumerate(indices):
                found[index] = outputs.each(partial(_newest, position, len(chains[index])))
        return [found[index] for index in range(len(rows))]

    def _forward(
        self,
        cache: ChainCache,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        max_scored: int,
        whole: list[TextStates] | None,
    ) -> Outputs:
        """The outputs, of each row, at the last nodes of texts of one length."""
        nodes = Forest.chains(texts, self.base.device)
        N = nodes.counts[0]
        last_M = torch.arange(max(N - max_scored, 0), N, device=self.base.device)
        with cache.reading(rows, texts):
            cache.check_room(N)
            tokens_BN, depths_BN, sees_BNN = nodes.padded()
            step = self._step(cache, depths_BN, sees_BNN, not any(cache.lengths_in_use))
            forward = self.base.hidden_and_logits
            return self._run_model(forward, cache, step, tokens_BN, last_M, whole)


def _first_path(parents: Sequence[int]) -> list[int]:
    """The nodes of a tree's first path, the root first."""
    path = [0]
    for node, parent in enumerate(parents):
        if parent == path[-1]:
            path.append(node)
    return path


def _newest(row: int, count: int, part_BNX: Tensor) -> Tensor:
    """What a row has at its last `count` tokens."""
    return part_BNX[row, max(part_BNX.shape[1] - count, 0) :]


def _alike(begun: Sequence[bool], texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of the texts that one forward reads."""
    sizes: dict[tuple[bool, int], list[int]] = {}
    for index, (goes_on, text) in enumerate(zip(begun, texts, strict=True)):
        sizes.setdefault((goes_on, len(text)), []).append(index)
    return list(sizes.values())
