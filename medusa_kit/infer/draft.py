"""The drafter's interface: it proposes a tree of tokens for each request and may see the result.

Topology is data: a list of parents for each request. Node 0 is the root, the base model's
own next token. A parent comes before its children. UNUSED marks a slot that holds no node.

Shapes: B batch, N nodes with root, D hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from medusa_kit.errors import Live
from medusa_kit.heads.draws import RowDraws
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.node_choice.choice import Chances
from medusa_kit.infer.decode.node_choice.cost import StepCost
from medusa_kit.infer.decode.timing import StepTiming
from medusa_kit.infer.host_tree import HostTree, host_tree
from medusa_kit.infer.likeliest import likeliest
from medusa_kit.infer.tree_step import Nodes
from medusa_kit.transfer import to_device

T = TypeVar("T")
ROOT, UNUSED = -1, -2
PerRequest = Sequence[Tensor] | Tensor  # a tensor for each request; one where all have one shape
COUNTS = "tokens a step: "  # how a note begins that counts an answer's steps
NODES = "nodes: "  # and one that counts their nodes
# Notes of figures, which are others after each answer, begin so; the rest are reasons.
FIGURES = (COUNTS, NODES, "lookahead: ", "draft model ", "draft tokens sent to ")


@dataclass(frozen=True)
class Topology:
    """Parents of one tree, and what follows from them: depths, and which nodes each node sees (its
    ancestors and itself)."""

    parents: tuple[int, ...]
    depths_N: Tensor
    sees_NN: Tensor

    @cached_property
    def num_used(self) -> int:
        """Nodes up to the last one that holds something."""
        return max(node for node, parent in enumerate(self.parents) if parent != UNUSED) + 1

    @property
    def used_parents(self) -> tuple[int, ...]:
        return self.parents[: self.num_used]

    @cached_property
    def on_host(self) -> HostTree:
        """The used nodes in the form that a captured forward takes."""
        return host_tree(self.used_parents)

    @cached_property
    def used_depths(self) -> Tensor:
        return self.depths_N[: self.num_used]

    @cached_property
    def used_sees(self) -> Tensor:
        """Which of the used nodes see which, flat."""
        return self.sees_NN[: self.num_used, : self.num_used].flatten()

    @classmethod
    def from_parents(cls, parents: Sequence[int], device: torch.device) -> "Topology":
        N = len(parents)
        depths, sees_NN = [0] * N, np.eye(N, dtype=bool)  # numpy: a tenth of torch's time per row
        for node, parent in enumerate(parents):
            if parent >= 0:
                depths[node] = depths[parent] + 1
                sees_NN[node] |= sees_NN[parent]
        return cls(
            tuple(parents), to_device(depths, device), to_device(torch.from_numpy(sees_NN), device)
        )


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass(frozen=True)
class Draft:
    """The trees of all requests: tokens_BN, and each one's topology (the same object where requests
    share one)."""

    tokens_BN: Tensor
    topologies: Sequence[Topology]

    @property
    def flat_tokens(self) -> Tensor:
        """Tokens of the used nodes, request after request."""
        counts = [topology.num_used for topology in self.topologies]
        if min(counts) == self.tokens_BN.shape[1]:
            return self.tokens_BN.flatten()
        trees = zip(self.tokens_BN, counts, strict=True)
        return torch.cat([tokens_N[:count] for tokens_N, count in trees])


@dataclass(eq=False, kw_only=True)
class RequestText:
    """What drafters see of a request whose prompt has been read, and what they keep of it."""

    text: list[int] = field(default_factory=list)  # prompt and committed tokens
    root: int = 0  # the base model's own next token
    hidden_1D: Tensor | None = None  # at the last committed token, whose next token is the root
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
        parts = [request.hidden_1D for request in self.requests if request.hidden_1D is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def draws(self) -> list[RowDraws | None] | None:
        """How the tokens after each request's root will be drawn; None where no request's are."""
        draws = [
            None if sampler is None else sampler.draws_after(len(tokens))
            for sampler, tokens in zip(self.samplers, self.tokens, strict=True)
        ]
        return draws if any(draws) else None

    def of_requests(self, indices: Sequence[int]) -> "State":
        """The state of these requests alone."""
        return State([self.requests[index] for index in indices])


def unread(tokens: list[int], root: int, num_read: int) -> list[int]:
    """The tokens of a request's text, root last, after the first `num_read`."""
    return [*tokens[num_read:], root] if num_read <= len(tokens) else []


@dataclass(frozen=True)
class StepResult:
    """The outcome of verifying a draft, for drafters that learn from it."""

    draft: Draft  # as proposed or selected, or a part of it (`Verifier.fitted`)
    paths: Sequence[Sequence[int]]  # accepted nodes of each request, root not included
    next_roots: Sequence[int]  # the token after each request's last accepted node
    hidden: PerRequest  # (N, D)
    logits: PerRequest  # (N, V)
    argmax_BN: Sequence[Sequence[int]] | None = None  # where the loop has them anyway
    ranked: PerRequest | None = None  # (N, R): the likeliest tokens, where they are known
    # Tokens of each request's used nodes, where they have been read from the device.
    tokens_read: Sequence[Sequence[int]] | None = None
    layers: PerRequest = ()  # (N, X): outputs of watched layers, one after another
    requests: Sequence[RequestText] = ()  # whose draft it was
    timing: StepTiming | None = None  # of the step, up to here

    def tokens(self, index: int) -> Sequence[int]:
        """Tokens of a request's nodes, of the used ones at least."""
        if self.tokens_read is not None:
            return self.tokens_read[index]
        tokens: list[int] = self.draft.tokens_BN[index].tolist()
        return tokens

    def argmax(self, index: int, nodes: Sequence[int]) -> list[int]:
        """The argmax of the base model's logits after each of these nodes, without processing, or
        NO_TOKEN."""
        if self.argmax_BN is not None:
            return [self.argmax_BN[index][node] for node in nodes]
        logits_NV = self.logits[index]
        nodes_M = to_device(nodes, logits_NV.device)
        return likeliest(logits_NV[nodes_M]).tolist()


def root_draft(roots_B: Sequence[int], device: torch.device) -> Draft:
    """The draft of a plain step: each request's root alone."""
    return Draft(
        to_device(roots_B, device)[:, None], [shared_topology((ROOT,), device)] * len(roots_B)
    )


def padded_draft(
    tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], device: torch.device
) -> Draft:
    """The draft with these nodes for each request; smaller trees are padded with unused ones."""
    N = max(len(tree) for tree in tokens)
    filled = [[*tree, *[tree[0]] * (N - len(tree))] for tree in tokens]
    topologies = [shared_topology((*tree, *[UNUSED] * (N - len(tree))), device) for tree in parents]
    return Draft(to_device(filled, device), topologies)


@lru_cache(maxsize=1024)
def shared_topology(parents: tuple[int, ...], device: torch.device) -> Topology:
    """The topology of these parents, the same object each time: trees of few shapes recur."""
    return Topology.from_parents(parents, device)


def flat_nodes(drafts: Sequence[Draft]) -> Nodes:
    """The used nodes of all drafts, request after request, to be verified in one forward."""
    topologies = [topology for draft in drafts for topology in draft.topologies]
    if len(topologies) == 1:
        (tree,), (draft,) = topologies, drafts
        return Nodes(draft.flat_tokens, tree.used_depths, tree.used_sees, [tree.num_used], [tree])
    return Nodes(
        torch.cat([draft.flat_tokens for draft in drafts]),
        torch.cat([topology.used_depths for topology in topologies]),
        torch.cat([topology.used_sees for topology in topologies]),
        [topology.num_used for topology in topologies],
        topologies,
    )


class Candidates(ABC):
    """Draft tokens of which the batch selects how many it verifies."""

    @property
    @abstractmethod
    def chances(self) -> Sequence[Chances]:
        """How likely each request's draft tokens are."""

    @abstractmethod
    def select(self, counts: Sequence[int]) -> Draft:
        """The likeliest of them, so many for each request, none or more."""


class Drafter(ABC, Live):
    """What proposes draft tokens, at each step for all requests that it drafts for.

    One that keeps nothing between steps has `name`, `num_nodes` and `propose` alone. What it keeps
    of a request lies with the request (`RequestText.own`), and is gone with it.
    """

    name: str
    num_nodes: int  # of one request's tree, at most, root included
    num_ranks: int = 0  # likeliest tokens after each node that it reads (`StepResult.ranked`)
    reads_prompts: bool = False  # hidden states of prompts (`RequestText.prompt_hidden`)
    watches: tuple[int, ...] = ()  # layers of the base whose outputs it reads (`StepResult.layers`)
    has_candidates: bool = False  # whether the batch chooses how many draft tokens it verifies
    rewinds: bool = False  # whether drafts may be taken back, since they depend on the root alone

    @abstractmethod
    def propose(self, state: State) -> Draft:
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
