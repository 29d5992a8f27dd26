"""Runs a draft model over rows of text with a verifier and cache of its own, which follow ours.

Shapes: B batch, N nodes with root, T tokens, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_kit.infer.draft import ROOT, UNUSED, Draft, shared_topology
from medusa_kit.infer.prefix_cache.prefixes import common_length
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients
from medusa_kit.transfer import to_device

FOLDED = 4  # up to so many unread tokens are read together with the next tree
ROOM = 256  # extra slots in a new cache


class DraftRunner:
    """`texts[row]`: all tokens of a row in the draft's ids. The last one, the root, is read with
    the tree after it. None: a row that is too long for the model's context."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.num_forwards = 0
        self._read: list[list[int]] = []  # what the cache holds
        self._unread: list[list[int]] = []
        self._cache: TreeCache | None = None

    @property
    def device(self) -> torch.device:
        return self.verifier.base.device

    def join(self, num_rows: int) -> None:
        self._read += [[] for _ in range(num_rows)]
        self._unread += [[] for _ in range(num_rows)]
        if self._cache is not None:
            self._cache.grow(self._cache.num_slots, len(self._read))

    def follow(self, texts: Sequence[Sequence[int] | None]) -> None:
        """Forget what is not in `texts`, and read what is new in them, except for the roots."""
        for row, text in enumerate(texts):
            self._unread[row] = []
            if text is None:
                continue
            kept = common_length(self._read[row], text[:-1])
            del self._read[row][kept:]
            if self._cache is not None:
                self._cache.lengths[row] = kept
            self._unread[row] = list(text[kept:-1])
        if max(map(len, self._unread)) > FOLDED:
            self._read_on()

    @no_gradients
    def verify(self, draft: Draft) -> tuple[list[Tensor], list[Tensor]]:
        """(hidden_ND, logits_NV) of each row's tree; its node 0 is the row's root."""
        whole = self._with_unread(draft)
        cache = self._room_for(whole.tokens_BN.shape[1])
        scores = self.verifier.forward(cache, whole.tokens_BN, whole.depths_BN, whole.sees_BNN)
        self.num_forwards += 1
        N, starts = draft.tokens_BN.shape[1], [len(unread) for unread in self._unread]
        own = [slice(start, start + N) for start in starts]
        return (
            [scores.hidden_BMD[row, nodes] for row, nodes in enumerate(own)],
            [scores.logits_BMV[row, nodes] for row, nodes in enumerate(own)],
        )

    def commit(self, draft: Draft, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep each row's root and these nodes after it; None: nothing new for that row."""
        assert self._cache is not None
        tokens_BN, kept = draft.tokens_BN.tolist(), list[list[int]]()
        for row, path in enumerate(paths):
            unread, start = self._unread[row], len(self._unread[row])
            nodes = [] if path is None else [0, *path]
            self._read[row] += [*unread, *(tokens_BN[row][node] for node in nodes)]
            kept.append([*range(start), *(start + node for node in nodes)])
            self._unread[row] = []
        self._cache.commit(kept)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._read = [self._read[row] for row in rows]
        self._unread = [self._unread[row] for row in rows]
        if not rows:
            self._cache = None
        elif self._cache is not None:
            self._cache.select_rows(rows)

    def _read_on(self) -> None:
        """Commit all unread tokens, in pieces."""
        B, device = len(self._read), self.device
        size = self.verifier.prompt_chunk(B)
        for start in range(0, max(map(len, self._unread)), size):
            chunks = [unread[start : start + size] for unread in self._unread]
            T = max(map(len, chunks))
            cache = self._room_for(T)
            sees_TT = torch.ones(T, T, dtype=torch.bool, device=device).tril()
            self.verifier.forward(
                cache,
                to_device([chunk + [0] * (T - len(chunk)) for chunk in chunks], device),
                torch.arange(T, device=device).expand(B, T),
                sees_TT.expand(B, T, T),
                causal_prompt=not any(cache.lengths),
                keep_M=to_device([0], device),
            )
            cache.commit([range(len(chunk)) for chunk in chunks])
        for read, unread in zip(self._read, self._unread, strict=True):
            read += unread
            unread.clear()

    def _with_unread(self, draft: Draft) -> Draft:
        """The tree after the tokens that are still unread, as one larger tree."""
        most = max(map(len, self._unread))
        if not most:
            return draft
        tokens, topologies = [], []
        for row, nodes in enumerate(draft.tokens_BN.tolist()):
            unread = self._unread[row]
            start, rest = len(unread), most - len(unread)
            shifted = [p + start if p >= 0 else p for p in draft.topologies[row].parents]
            shifted[0] = start - 1  # equals ROOT where nothing is unread
            tokens.append([*unread, *nodes, *[0] * rest])
            parents = (*range(ROOT, start - 1), *shifted, *[UNUSED] * rest)
            topologies.append(shared_topology(parents, self.device))
        return Draft(to_device(tokens, self.device), topologies)

    def _room_for(self, num_nodes: int) -> TreeCache:
        """The cache, with room for `num_nodes` more slots."""
        if self._cache is None:
            num_slots = max(map(len, self._unread)) + num_nodes + ROOM
            self._cache = self.verifier.new_cache(len(self._read), num_slots)
        needed = max(self._cache.lengths) + num_nodes
        if needed > self._cache.num_slots:
            self._cache.grow(max(needed + ROOM, self._cache.num_slots * 3 // 2))
        return self._cache
