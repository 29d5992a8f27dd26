"""The drafter's interface: it proposes a tree of tokens for each request and may see the result.

A tree is data: tokens, and a parent for each. Node 0 is the root, the base model's own next token.

Shapes: B batch, N nodes with root, D hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from medusa_kit.errors import Live
from medusa_kit.heads.draws import RowDraws
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.node_choice.choice import Chances
from medusa_kit.infer.decode.node_choice.cost import StepCost
from medusa_kit.infer.decode.timing import StepTiming
from medusa_kit.infer.forest import Forest
from medusa_kit.transfer import to_device

T = TypeVar("T")
COUNTS = "tokens a step: "  # how a note begins that counts an answer's steps
NODES = "nodes: "  # and one that counts their nodes
# Notes of figures, which are others after each answer, begin so; the rest are reasons.
FIGURES = (COUNTS, NODES, "draft model ", "draft tokens sent to ")


@dataclass(eq=False, kw_only=True)
class RequestText:
    """What drafters see of a request whose prompt has been read, and what they keep of it."""

    text: list[int] = field(default_factory=list)  # prompt and committed tokens
    root: int = 0  # the base model's own next token
    # Row `hidden_row` of hidden_ND is that at the last committed token, whose next token is the
    # root. The others are of other requests of the step, or of tokens that were not accepted.
    hidden_ND: Tensor | None = None
    hidden_row: int = 0
    sampler: Sampler | None = None  # None: by argmax
    # While it begins, for a drafter that `reads_prompts`: hidden_TD at the last T tokens of its
    # prompt, which are all but those that were cached, where torch has read them.
    prompt_hidden: Tensor | None = None
    prompt_layers: Tensor | None = None  # likewise, of the layers that a drafter watches
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)  # by the drafter that keeps it
    token_ids: list[int] = field(default_factory=list)  # of the answer, as far as it was emitted
    finish_reason: str | None = None  # stop | length | cancelled | error
    # Sources of the tokens accepted in the newest step, where its drafter has several.
    credits: list[str] | None = None
    drafted_by: str | None = None  # the sources of the newest step's draft, where it has several

    @property
    def hidden_1D(self) -> Tensor | None:
        """The hidden state at the last committed token."""
        whole_ND, row = self.hidden_ND, self.hidden_row
        return None if whole_ND is None else whole_ND[row : row + 1]

    @property
    def is_complete(self) -> bool:
        """Whether the answer came to its end."""
        return self.finish_reason in ("stop", "length")

    def own(self, drafter: Any, make: Callable[[], T]) -> T:
        """What a drafter keeps for this request, made now if there is nothing yet."""
        if drafter not in self.kept:
            self.kept[drafter] = make()
        kept: T = self.kept[drafter]
        return kept


class State:
    """The requests before a step. `tokens[b]`: prompt and committed tokens of request b."""

    def __init__(self, requests: Sequence[RequestText]) -> None:
        self.requests = requests
        self.tokens = [request.text for request in requests]
        self.roots_B = [request.root for request in requests]
        self.samplers = [request.sampler for request in requests]

    @cached_property
    def hidden_BD(self) -> Tensor:
        """Hidden states at the last committed token of each request, whose next token is the
        root."""
        known = [request for request in self.requests if request.hidden_ND is not None]
        whole_ND, rows = known[0].hidden_ND, [request.hidden_row for request in known]
        assert whole_ND is not None
        if any(request.hidden_ND is not whole_ND for request in known):  # not of one step
            return torch.cat([part for one in known if (part := one.hidden_1D) is not None])
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return whole_ND[rows[0] : rows[0] + len(rows)]
        return whole_ND[to_device(rows, whole_ND.device)]

    def draws(self) -> list[RowDraws | None] | None:
        """How the tokens after each request's root will be drawn; None where no request's are."""
        draws = [
            None if sampler is None else sampler.draws_after(len(tokens))
            for sampler, tokens in zip(self.samplers, self.tokens, strict=True)
        ]
        return draws if any(draws) else None


def unread(tokens: list[int], root: int, num_read: int) -> list[int]:
    """The tokens of a request's text, root last, after the first `num_read`."""
    return [*tokens[num_read:], root] if num_read <= len(tokens) else []


@dataclass(frozen=True)
class StepResult:
    """The outcome of verifying a draft, for drafters that learn from it."""

    draft: Forest  # as proposed or selected, or a part of it (`Verifier.fitted`)
    trees: Sequence[ScoredTree]  # of each request, and what was accepted of it
    requests: Sequence[RequestText] = ()  # whose draft it was
    timing: StepTiming | None = None  # of the step, up to here

    @cached_property
    def paths(self) -> list[list[int]]:
        """Accepted nodes of each request, root not included."""
        return [tree.path for tree in self.trees]


class Candidates(ABC):
    """Draft tokens of which the batch selects how many it verifies."""

    @property
    @abstractmethod
    def chances(self) -> Sequence[Chances]:
        """How likely each request's draft tokens are."""

    @abstractmethod
    def select(self, counts: Sequence[int]) -> Forest:
        """The likeliest of them, so many for each request, none or more."""


class Drafter(ABC, Live):
    """What proposes draft tokens, at each step for all requests that it drafts for.

    One that keeps nothing between steps has `name`, `num_nodes` and `propose` alone. What it keeps
    of a request lies with the request (`RequestText.own`), and is gone with it.
    """

    name: str
    num_nodes: int  # of one request's tree, at most, root included
    num_ranks: int = 0  # likeliest tokens after each node that it reads (`ScoredTree.ranked_NR`)
    reads_prompts: bool = False  # hidden states of prompts (`RequestText.prompt_hidden`)
    watches: tuple[
        int, ...
    ] = ()  # layers of the base whose outputs it reads (`ScoredTree.layers_NX`)
    has_candidates: bool = False  # whether the batch chooses how many draft tokens it verifies
    rewinds: bool = False  # whether drafts may be taken back, since they depend on the root alone

    @abstractmethod
    def propose(self, state: State) -> Forest:
        """A tree for each request."""

    def candidates(self, state: State, cost: StepCost, num_others: int) -> Candidates:
        """Draft tokens and how likely they are, in place of `propose`."""
        raise NotImplementedError

    # What follows is empty: one that keeps nothing between steps has nothing to do.
    def begin(self, request: RequestText) -> None:
        """A request begins: its text is the prompt, its root the first token of the answer."""

    def observe(self, step: StepResult) -> None:
        """Learn what became of the draft, which may be another drafter's. Text and root of
        `step.requests` are still those that it was made from."""

    def finish(self, requests: Sequence[RequestText]) -> None:
        """These requests have ended, or were cancelled before they began."""

    def describe(self) -> str:
        """The drafter's name in statistics, with what it did so far."""
        return self.name

    @property
    def notes(self) -> list[str]:
        """Reasons, and figures over all requests so far; those begin as FIGURES says."""
        return []


def first_reason(notes: Sequence[str]) -> str:
    """Why drafting went as it did, of a drafter's notes; empty where none says it."""
    return next((note for note in notes if not note.startswith(FIGURES)), "")
