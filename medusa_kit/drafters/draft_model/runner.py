"""Runs a draft model over rows of text with a verifier and cache of its own, which follow ours.

Shapes: B batch, N nodes with root, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_kit.drafters.slots import Slots
from medusa_kit.infer.decode.slots import common_length
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.renewal import up_to_date
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.tree.shape import ROOT

FOLDED = 4  # up to so many unread tokens are read together with the next tree
ROOM = 256  # extra slots in a new cache


class DraftRunner:
    """Each request has a slot of the cache. Its text is all its tokens in the draft's ids; the last
    one, the root, is read with the tree after it. None: one too long for the model's context."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self._number = verifier, verifier.number
        self.num_forwards = 0
        self._slots, self._drafting = Slots(), list[int]()  # those of the newest draft
        self._read: list[list[int]] = []  # what the cache holds, by slot
        self._unread: list[list[int]] = []
        self._cache: TreeCache | None = None

    @property
    def device(self) -> torch.device:
        return self.verifier.base.device

    def begin(self) -> int:
        """The slot of a request that begins."""
        number = up_to_date(self.verifier, check=False)
        if number != self._number:  # what it has read is of another model
            self._number, self._cache = number, None
            self._read = [[] for _ in self._read]
        if self._slots.needs_new:
            if self._cache is not None:  # first: where memory is too small, all is as it was
                self._cache.grow(self._cache.num_positions, self._slots.count + 1)
            self._read.append([])
            self._unread.append([])
        return self._slots.take()

    def finish(self, slot: int) -> None:
        """Its request has ended."""
        self._slots.give_back(slot)
        self._read[slot], self._unread[slot] = [], []
        if self._slots.num_taken == 0:
            self._cache = None
        elif self._cache is not None:
            self._cache.keep_first(slot, 0)

    def follow(self, slots: Sequence[int], texts: Sequence[Sequence[int] | None]) -> None:
        """Draft for these slots. Forget what is not in their texts, and read what is new in them,
        except for the roots."""
        self._drafting = list(slots)
        for slot, text in zip(slots, texts, strict=True):
            self._unread[slot] = []
            if text is None:
                continue
            kept = common_length(self._read[slot], text[:-1])
            del self._read[slot][kept:]
            if self._cache is not None:
                self._cache.lengths[slot] = kept
            self._unread[slot] = list(text[kept:-1])
        if self._most_unread > FOLDED:
            self._read_on()

    def verify(self, draft: Forest) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """(hidden_ND, logits_NV) of each request's tree; its node 0 is the root."""
        nodes = self._with_unread(draft)
        cache = self._room_for(max(nodes.counts))
        scores = self.verifier.score(cache, nodes, self._drafting)
        self.num_forwards += 1
        hidden, logits = (
            [one[len(self._unread[slot]) :] for slot, one in zip(self._drafting, rows, strict=True)]
            for rows in (part.split(nodes.counts) for part in (scores.hidden_ND, scores.logits_NV))
        )
        return hidden, logits

    def commit(self, draft: Forest, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep each request's root and these nodes after it; None: nothing new for that one."""
        assert self._cache is not None
        kept = list[list[int]]()
        for slot, tokens, path in zip(self._drafting, draft.token_lists(), paths, strict=True):
            unread, start = self._unread[slot], len(self._unread[slot])
            nodes = [] if path is None else [0, *path]
            self._read[slot] += [*unread, *(tokens[node] for node in nodes)]
            kept.append([*range(start), *(start + node for node in nodes)])
            self._unread[slot] = []
        self._cache.commit(kept, self._drafting)

    @property
    def _most_unread(self) -> int:
        return max(len(self._unread[slot]) for slot in self._drafting)

    def _read_on(self) -> None:
        """Commit all unread tokens."""
        slots = [slot for slot in self._drafting if self._unread[slot]]
        pieces = [self._unread[slot] for slot in slots]
        self.verifier.read_prompts(self._room_for(max(map(len, pieces))), slots, pieces)
        for slot in slots:
            self._read[slot] += self._unread[slot]
            self._unread[slot] = []

    def _with_unread(self, draft: Forest) -> Forest:
        """The trees after the tokens that are still unread, each as one larger tree."""
        texts = [self._unread[slot] for slot in self._drafting]
        if not any(texts):
            return draft
        tokens, parents = list[list[int]](), list[list[int]]()
        for unread, own, shape in zip(texts, draft.token_lists(), draft.shapes, strict=True):
            tokens.append([*unread, *own])  # the root follows the last unread token
            behind = (parent + len(unread) for parent in shape.parents)
            parents.append([*range(ROOT, len(unread) - 1), *behind])
        return Forest.of(tokens, parents, self.device)

    def _room_for(self, num_nodes: int) -> TreeCache:
        """The cache, with room for `num_nodes` more slots."""
        if self._cache is None:
            num_positions = self._most_unread + num_nodes + ROOM
            self._cache = self.verifier.new_cache(len(self._read), num_positions)
        needed = max(self._cache.lengths) + num_nodes
        if needed > self._cache.num_positions:
            self._cache.grow(max(needed + ROOM, self._cache.num_positions * 3 // 2))
        return self._cache
