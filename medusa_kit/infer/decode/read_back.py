"""What the host reads of a step's scores, in one transfer, so that it waits for a device once.

Shapes: N nodes of all requests, R likeliest tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.request import Request
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.likeliest import NO_TOKEN
from medusa_kit.infer.outputs import NodeScores


class _Read(NamedTuple):
    """Numbers of all nodes, request after request: their tokens; the argmax after each, where it is
    at hand or some request of the step needs it, NO_TOKEN where scores are not finite; near ties
    likewise; the likeliest R tokens, where drafters read them.

    `drawn`: for each request, the tokens after its nodes as they are drawn, where one operation
    draws them all; None where each is chosen when it is reached.
    """

    tokens: list[int]
    argmax: list[int] | None
    near_ties: list[int] | None
    ranked_NR: Tensor | None
    drawn: Sequence[list[int] | None]


def read_back(
    nodes: Forest, scores: NodeScores, requests: Sequence[Request], ranks: int = 0
) -> list[ScoredTree]:
    """Each request's scored tree. `ranks`: how many of the likeliest tokens drafters read."""
    tolerances = [request.rounding_tolerance for request in requests if request.counts_near_ties]
    tolerance = max(tolerances, default=None)
    if scores.ranked_NR is not None:
        # The C++ kernels' tokens lie in the host's memory, where numbers are read in less time than
        # an operation on few of them takes.
        by_rank, near_ties = scores.ranked_argmax(), scores.ranked_near_ties(tolerance)
        known_NR, nothing = _known(scores.ranked_NR, by_rank), [None] * len(requests)
        read = _Read(nodes.tokens_N.tolist(), by_rank, near_ties, known_NR, nothing)
    else:
        read = _from_device(nodes, scores, requests, ranks, tolerance)
    trees, first, alone = list[ScoredTree](), 0, len(requests) == 1
    for request, shape, drawn in zip(requests, nodes.shapes, read.drawn, strict=True):
        of_it = slice(first, first := first + len(shape.parents))
        argmax = None if read.argmax is None else read.argmax[of_it]
        trees.append(
            ScoredTree(
                read.tokens[of_it],
                shape.parents,
                scores.hidden_ND if alone else scores.hidden_ND[of_it],
                scores.logits_NV if alone else scores.logits_NV[of_it],
                scores.layers_NX if alone or scores.layers_NX is None else scores.layers_NX[of_it],
                None if read.ranked_NR is None else read.ranked_NR[of_it],
                argmax,
                None if read.near_ties is None else read.near_ties[of_it],
                argmax if request.sampler.takes_argmax else drawn,
            )
        )
    return trees


def _from_device(
    nodes: Forest,
    scores: NodeScores,
    requests: Sequence[Request],
    ranks: int,
    tolerance: float | None,
) -> _Read:
    takes_argmax = any(request.sampler.takes_argmax for request in requests)
    on_host = scores.logits_NV.device.type == "cpu"
    ranked_NR = None
    if ranks and not on_host:
        ranked_NR = scores.logits_NV.topk(min(ranks, scores.logits_NV.shape[1])).indices
    read = _read(
        [
            nodes.tokens_N,
            scores.argmax() if takes_argmax or not on_host else None,
            None if tolerance is None else scores.near_ties(tolerance),
            None if ranked_NR is None else ranked_NR.flatten(),
            *([None] * len(requests) if on_host else _draws(nodes, scores, requests)),
        ]
    )
    tokens, argmax, near_ties, ranked, *drawn = read
    assert tokens is not None
    if ranked is not None and ranked_NR is not None:
        assert argmax is not None, "read from a device in any case"
        ranked_NR = _known(torch.tensor(ranked).view(ranked_NR.shape), argmax)
    return _Read(tokens, argmax, near_ties, ranked_NR, drawn)


def _known(ranked_NR: Tensor, argmax: Sequence[int]) -> Tensor:
    """ranked_NR with NO_TOKEN after the nodes whose scores are not finite."""
    if NO_TOKEN not in argmax:
        return ranked_NR
    unknown_N1 = torch.tensor(argmax)[:, None] == NO_TOKEN
    return ranked_NR.masked_fill(unknown_N1, NO_TOKEN)


def _read(parts: Sequence[Tensor | None]) -> list[list[int] | None]:
    """These numbers on the host, in one transfer."""
    known = [part for part in parts if part is not None]
    whole = iter(torch.cat(known).tolist())
    return [None if part is None else [next(whole) for _ in range(len(part))] for part in parts]


def _draws(
    nodes: Forest, scores: NodeScores, requests: Sequence[Request]
) -> Iterator[Tensor | None]:
    """The drawn tokens after each request's nodes, where one operation draws them all."""
    first = 0
    for request, count, shape in zip(requests, nodes.counts, nodes.shapes, strict=True):
        logits_NV = scores.logits_NV[first : first + count]
        committed = len(request.prompt_ids) + len(request.token_ids) - 1  # the root is not
        positions = [committed + 1 + depth for depth in shape.depths_N.tolist()]
        yield request.sampler.drawn_after(logits_NV, positions)
        first += count
