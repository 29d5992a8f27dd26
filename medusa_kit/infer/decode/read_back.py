"""What the host reads of a step's scores, in one transfer, so that it waits for a device once.

Shapes: N nodes of all requests, R likeliest tokens, V vocabulary.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.request import Request
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.likeliest import NO_TOKEN
from medusa_kit.infer.outputs import NodeScores
from medusa_kit.transfer import to_device


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
    if scores.ranked_NR is not read.ranked_NR:
        scores = replace(scores, ranked_NR=read.ranked_NR)
    trees, first = list[ScoredTree](), 0
    for request, shape, drawn in zip(requests, nodes.shapes, read.drawn, strict=True):
        last = first + len(shape.parents)
        argmax = None if read.argmax is None else read.argmax[first:last]
        near_ties = None if read.near_ties is None else read.near_ties[first:last]
        named = argmax if request.sampler.takes_argmax else drawn
        tokens = read.tokens[first:last]
        trees.append(ScoredTree(tokens, shape.parents, scores, first, argmax, near_ties, named))
        first = last
    return trees


def _from_device(
    nodes: Forest,
    scores: NodeScores,
    requests: Sequence[Request],
    ranks: int,
    tolerance: float | None,
) -> _Read:
    takes_argmax = any(request.sampler.takes_argmax for request in requests)
    on_host = _is_on_host(scores.logits_NV)
    ranked_NR = None
    if ranks and not on_host:
        ranked_NR = scores.logits_NV.topk(min(ranks, scores.logits_NV.shape[1])).indices
    rows_of_draws = {} if on_host else _drawn_together(requests)
    read = _read(
        [
            nodes.tokens_N,
            scores.argmax() if takes_argmax or not on_host else None,
            None if tolerance is None else scores.near_ties(tolerance),
            None if ranked_NR is None else ranked_NR.flatten(),
            *(_draws(nodes, scores, requests, rows) for rows in rows_of_draws.values()),
        ]
    )
    tokens, argmax, near_ties, ranked, *draws = read
    assert tokens is not None
    drawn: list[list[int] | None] = [None] * len(requests)
    for rows, named in zip(rows_of_draws.values(), draws, strict=True):
        assert named is not None
        ends = list(accumulate(nodes.counts[row] for row in rows))
        for row, end in zip(rows, ends, strict=True):
            drawn[row] = named[end - nodes.counts[row] : end]
    if ranked is not None and ranked_NR is not None:
        assert argmax is not None, "read from a device in any case"
        ranked_NR = _known(torch.tensor(ranked).view(ranked_NR.shape), argmax)
    return _Read(tokens, argmax, near_ties, ranked_NR, drawn)


def _is_on_host(logits_NV: Tensor) -> bool:
    return logits_NV.device.type == "cpu"


def _known(ranked_NR: Tensor, argmax: Sequence[int]) -> Tensor:
    """ranked_NR with NO_TOKEN after the nodes whose scores are not finite."""
    if NO_TOKEN not in argmax:
        return ranked_NR
    unknown_N1 = torch.tensor(argmax)[:, None] == NO_TOKEN
    return ranked_NR.masked_fill(unknown_N1, NO_TOKEN)


def _read(parts: Sequence[Tensor | None]) -> list[list[int] | None]:
    """These numbers on the host, in one transfer."""
    whole, first = torch.cat([part for part in parts if part is not None]).tolist(), 0
    found = list[list[int] | None]()
    for part in parts:
        if part is None:
            found.append(None)
        else:
            found.append(whole[first : first + len(part)])
            first += len(part)
    return found


def _drawn_together(requests: Sequence[Request]) -> dict[Hashable, list[int]]:
    """Requests whose tokens one operation draws, by how these are drawn."""
    found: dict[Hashable, list[int]] = {}
    for row, request in enumerate(requests):
        if (how := request.sampler.draws_alike) is not None:
            found.setdefault(how, []).append(row)
    return found


def _draws(
    nodes: Forest, scores: NodeScores, requests: Sequence[Request], rows: Sequence[int]
) -> Tensor:
    """The drawn tokens after the nodes of these requests, which are drawn alike."""
    logits_NV, seeds = scores.logits_NV, list[int]()
    for row in rows:
        committed = len(requests[row].text) + 1  # tokens in front of what follows the root
        seeds += requests[row].sampler.seeds(committed, nodes.shapes[row].depths_N.tolist())
    if len(rows) < len(requests):
        ends = list(accumulate(nodes.counts))
        at = [n for row in rows for n in range(ends[row] - nodes.counts[row], ends[row])]
        logits_NV = logits_NV[to_device(at, logits_NV.device)]
    return requests[rows[0]].sampler.drawn_after(logits_NV, seeds)
