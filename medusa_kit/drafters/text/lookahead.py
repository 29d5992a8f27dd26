"""Lookahead decoding (Fu et al., arXiv 2402.02057): the base model drafts for itself.

Two branches share each forward. In the window, W columns of N - 1 tokens are refined by Jacobi
iteration: column i is i places after the root and sees the first tokens of the columns before it
and its own tokens. The base's likeliest token after it completes an n-gram, which goes into a pool.
The other branch verifies the pool's n-grams that begin with the root.

Both are one tree: the first tokens of the columns are a chain, and the rest of each column is below
its first token. So nodes of the window can be accepted too, and equal beginnings share nodes.

Shapes: W columns, N tokens of an n-gram, G n-grams verified in a step (the paper's letters).
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch

from medusa_kit.base.families import needs_chains
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.drafter import State, StepResult
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.likeliest import NO_TOKEN
from medusa_kit.settings.drafters import LookaheadOptions
from medusa_kit.tree.draft_tree import DraftTree

MAX_NODES = 512  # verified in a step; more never pays
POOL_CHANCE, WINDOW_CHANCE = 0.35, 0.2  # that a draft token is right if its parent is


class Pool:
    """N-grams of one row by their first token, the latest first."""

    def __init__(self, per_token: int) -> None:
        self._per_token = per_token
        self._followers: dict[int, dict[tuple[int, ...], None]] = {}  # oldest first

    def add(self, ngram: Sequence[int]) -> None:
        followers, follower = self._followers.setdefault(ngram[0], {}), tuple(ngram[1:])
        followers.pop(follower, None)
        followers[follower] = None
        if len(followers) > self._per_token:
            del followers[next(iter(followers))]

    def add_text(self, tokens: Sequence[int], size: int) -> None:
        for start in range(len(tokens) - size + 1):
            self.add(tokens[start : start + size])

    def following(self, token: int, count: int) -> list[tuple[int, ...]]:
        """Up to `count` continuations of `token`."""
        return list(islice(reversed(self._followers.get(token, {})), count))


class Window:
    """The columns of one row. They begin as single tokens and gain one a step up to N - 1.

    While they grow, the text passes the first ones, so there are N - 2 more at the start.
    """

    def __init__(self, seeds: Sequence[int], size: int) -> None:
        self.columns = [[token] for token in seeds]
        self._size = size  # N
        self.ends: list[int] = []  # the node of each column's last token

    def plant(self, tree: DraftTree) -> None:
        """Add the columns to a tree of draft tokens after the root."""
        first, self.ends = 0, []
        self.columns[0][0] = tree.tokens[0]
        for index, column in enumerate(self.columns):
            if index:
                key = ("lookahead", "window", index)
                first = tree.add(first, column[0], WINDOW_CHANCE, key)
            node = first
            for depth, token in enumerate(column[1:], start=index + 1):
                node = tree.add(node, token, WINDOW_CHANCE, ("lookahead", "window", depth))
            self.ends.append(node)

    def advance(self, found: Sequence[int]) -> list[list[int]]:
        """Append the likeliest token to each column, or its first where there is NO_TOKEN; returns
        the n-grams that this completes.

        A full column loses its first token and so keeps its place after the new root, whatever the
        number of accepted tokens. Windows shifted by that number and refilled at the right drafted
        worse.
        """
        for column, token in zip(self.columns, found, strict=True):
            column.append(column[0] if token == NO_TOKEN else token)
        if len(self.columns[0]) < self._size:
            del self.columns[0]
            return []
        ngrams = self.columns
        self.columns = [column[1:] for column in ngrams]
        return ngrams


class _Row:
    """The pool and the window of one row."""

    def __init__(self, tokens: Sequence[int], options: LookaheadOptions) -> None:
        W, N = options.window, options.ngram
        self.options, self.pool = options, Pool(options.pool)
        self.window = Window(_seeds(tokens, W + N - 2), N)
        self._read = 0 if options.from_prompt else len(tokens)  # tokens that the pool has seen

    def read(self, tokens: Sequence[int], root: int) -> None:
        """Add the n-grams of the new text, up to the root."""
        start = max(self._read - self.options.ngram + 1, 0)
        self.pool.add_text([*tokens[start:], root], self.options.ngram)
        self._read = len(tokens) + 1

    def tree(self, root: int) -> DraftTree:
        tree = DraftTree(root)
        self.window.plant(tree)
        for follower in self.pool.following(root, self.options.guesses):
            node = 0
            for depth, token in enumerate(follower, start=1):
                node = tree.add(node, token, POOL_CHANCE, ("lookahead", "pool", depth))
        return tree


class LookaheadDrafter(TreeDrafter):
    name = "lookahead"

    def __init__(self, options: LookaheadOptions, device: torch.device) -> None:
        super().__init__(device)
        self.options = options
        self.num_nodes = most_nodes(options)
        self._draft: Forest | None = None
        self._steps = self._nodes = self._emitted = 0  # summed over rows

    def guess(self, state: State) -> list[DraftTree]:
        rows = [(one, one.own(self, partial(_Row, one.text, self.options)))
                for one in state.requests]  # fmt: skip
        for one, row in rows:
            row.read(one.text, one.root)
        return [row.tree(one.root) for one, row in rows]

    def propose(self, state: State) -> Forest:
        self._draft = super().propose(state)
        return self._draft

    def observe(self, step: StepResult) -> None:
        self._steps += len(step.trees)
        self._emitted += sum(1 + len(path) for path in step.paths)
        self._nodes += sum(step.draft.counts)
        if step.draft is not self._draft:
            return  # another drafter's tree, which does not hold the window
        for request, tree in zip(step.requests, step.trees, strict=True):
            row: _Row = request.kept[self]
            for ngram in row.window.advance(tree.argmax_after(row.window.ends)):
                row.pool.add(ngram)

    @property
    def notes(self) -> list[str]:
        if not self._steps:
            return []
        nodes, tokens = self._nodes / self._steps, self._emitted / self._steps
        return [f"lookahead: {nodes:.1f} nodes verified a step, {tokens:.2f} tokens a forward"]


def most_nodes(options: LookaheadOptions) -> int:
    """Nodes of the largest step, root included. While the window fills, it may be wider."""
    W, levels = options.window, options.ngram - 1
    window = max(depth * (W + levels - depth) for depth in range(1, levels + 1))
    return window + options.guesses * levels


def _seeds(tokens: Sequence[int], count: int) -> list[int]:
    """Tokens to start the columns with, spread over the prompt."""
    return [tokens[(index * 7919) % len(tokens)] for index in range(count)]


def build(context: DraftContext, options: LookaheadOptions) -> LookaheadDrafter:
    """Raises ConfigError where a step would have more than MAX_NODES nodes, and for a base that
    verifies chains alone: windows are branches."""
    if context.verifier.chains_only:
        raise ConfigError(
            f"lookahead needs branches, and on {context.base.info.name!r} draft tokens must "
            f"follow one another: {needs_chains(context.base.config)}",
            hint="use another drafter, such as auto",
        )
    nodes, limit = most_nodes(options), min(context.base.info.context_length, MAX_NODES)
    if nodes > limit:
        raise ConfigError(
            f"lookahead: window={options.window}, ngram={options.ngram} and "
            f"guesses={options.guesses} make {nodes} nodes a step; expected at most {limit}",
            hint="there are (`window` + `guesses`) * (`ngram` - 1) nodes: reduce one of the three",
        )
    return LookaheadDrafter(options, context.device)
