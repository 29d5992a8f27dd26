"""Prompt lookup: copies what followed when the same tokens last occurred in prompt or answer.

The longest n-gram at the text's end, root included, is tried first; its latest earlier occurrence
is copied. A copy that reaches the text's end continues with itself, so that a loop is predicted
beyond its last round. Method: github.com/apoorvumang/prompt-lookup-decoding.
"""

from collections.abc import Sequence

import torch

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.infer.decode.drafter import RequestText, State, unread
from medusa_kit.settings.drafters import PromptLookupOptions
from medusa_kit.tree.draft_tree import DraftTree

# How often a copied token was right, by how many tokens before it agreed; the last value is for all
# longer matches (replayed over a model's known answers).
CHANCES = (0.0, 0.24, 0.55, 0.65, 0.7, 0.74, 0.79, 0.82, 0.94)
MAX_MATCH = len(CHANCES) - 1


class NgramIndex:
    """A text, and for each n-gram in it the latest position that follows an occurrence."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}

    def read(self, tokens: Sequence[int]) -> None:
        text = self.tokens
        for token in tokens:
            position = len(text)
            for size in self.sizes:
                if size <= position:
                    self._behind[tuple(text[position - size :])] = position
            text.append(token)

    def copy(self, num_tokens: int) -> tuple[int, list[int]]:
        """(tokens that agree, what followed them) for the longest n-gram; (0, []) without one."""
        text = self.tokens
        for size in self.sizes:
            position = self._behind.get(tuple(text[-size:])) if size <= len(text) else None
            if position is not None:
                copied = text[position : position + num_tokens]
                period = len(copied)
                copied += [copied[i % period] for i in range(period, num_tokens)]
                return self._agreement(position, size), copied
        return 0, []

    def _agreement(self, position: int, known: int) -> int:
        """How many tokens before `position` agree with the text's end, as far as it matters."""
        text, size = self.tokens, known
        while size < min(MAX_MATCH, position) and text[position - size - 1] == text[-size - 1]:
            size += 1
        return size


class PromptLookupDrafter(TreeDrafter):
    name = "prompt-lookup"

    def __init__(self, options: PromptLookupOptions, device: torch.device) -> None:
        super().__init__(device)
        self.options, self.num_nodes = options, options.num_tokens + 1

    def guess(self, state: State) -> list[DraftTree]:
        return [self._row(one.own(self, self._index), one) for one in state.requests]

    def _index(self) -> NgramIndex:
        return NgramIndex(self.options.min_ngram, self.options.max_ngram)

    def _row(self, index: NgramIndex, request: RequestText) -> DraftTree:
        index.read(unread(request.text, request.root, len(index.tokens)))
        matched, copied = index.copy(self.options.num_tokens)
        tree, node = DraftTree(request.root), 0
        for depth, token in enumerate(copied, start=1):
            # Each right copied token makes the match one token longer.
            chance = CHANCES[min(matched + depth - 1, MAX_MATCH)]
            node = tree.add(
                node, token, chance, (self.name, min(matched, MAX_MATCH), min(depth, 4))
            )
        return tree


def build(context: DraftContext, options: PromptLookupOptions) -> PromptLookupDrafter:
    return PromptLookupDrafter(options, context.device)
