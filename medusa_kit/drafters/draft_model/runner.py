"""Runs a draft model over rows of text with a verifier and cache of its own, which follow ours.

Shapes: B batch, N nodes with root, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_kit.infer.draft import ROOT, Draft, flat_nodes, shared_topology
from medusa_kit.infer.prefix_cache.prefixes import common_length
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
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

    def verify(self, draft: Draft) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """(hidden_ND, logits_NV) of each row's tree; its node 0 is the row's root."""
        nodes = flat_nodes(self._with_unread(draft))
        cache = self._room_for(max(nodes.counts))
        scores = self.verifier.score(cache, nodes, range(len(nodes.counts)))
        self.num_forwards += 1
        hidden, logits = (
            [one[len(unread) :] for one, unread in zip(rows, self._unread, strict=True)]
            for rows in (part.split(nodes.counts) for part in (scores.hidden_ND, scores.logits_NV))
        )
        return hidden, logits

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
        """Commit all unread tokens."""
        rows = [row for row, unread in enumerate(self._unread) if unread]
        pieces = [self._unread[row] for row in rows]
        self.verifier.read_prompts(self._room_for(max(map(len, pieces))), rows, pieces)
        for read, unread in zip(self._read, self._unread, strict=True):
            read += unread
            unread.clear()

    def _with_unread(self, draft: Draft) -> list[Draft]:
        """The trees after the tokens that are still unread, each as one larger tree."""
        if not any(self._unread):
            return [draft]
        trees = list[Draft]()
        rows = zip(self._unread, draft.tokens_BN.tolist(), draft.topologies, strict=True)
        for unread, tokens, topology in rows:
            start = len(unread)
            shifted = [p + start if p >= 0 else p for p in topology.used_parents]
            shifted[0] = start - 1  # equals ROOT where nothing is unread
            own = to_device([[*unread, *tokens[: topology.num_used]]], self.device)
            shape = shared_topology((*range(ROOT, start - 1), *shifted), self.device)
            trees.append(Draft(own, [shape]))
        return trees

    def _room_for(self, num_nodes: int) -> TreeCache:
        """The cache, with room for `num_nodes` more slots."""
        if self._cache is None:
            num_slots = max(map(len, self._unread)) + num_nodes + ROOM
            self._cache = self.verifier.new_cache(len(self._read), num_slots)
        needed = max(self._cache.lengths) + num_nodes
        if needed > self._cache.num_slots:
            self._cache.grow(max(needed + ROOM, self._cache.num_slots * 3 // 2))
        return self._cache
