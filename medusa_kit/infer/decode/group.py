"""Requests that draft together, by one drafter, and where they stand.

Shapes: N nodes of all requests, V vocabulary, R likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.node_choice.choice import choose_nodes
from medusa_kit.infer.decode.node_choice.cost import StepCost
from medusa_kit.infer.decode.read_back import read_back
from medusa_kit.infer.decode.request import Emitted, FailAlone, Request
from medusa_kit.infer.decode.timing import StepTiming
from medusa_kit.infer.details import VerifiedTree, token_scores
from medusa_kit.infer.draft import Candidates, Drafter, State, StepResult
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.tree_step import NodeScores
from medusa_kit.transfer import to_device

T = TypeVar("T")


class Group:
    """Requests of one step with the same drafter."""

    def __init__(self, drafter: Drafter, requests: list[Request]) -> None:
        self.drafter, self.requests = drafter, requests
        self._chosen = False

    @property
    def state(self) -> State:
        return State(self.requests)

    def candidates(self, cost: StepCost, num_others: int) -> Candidates | None:
        """Of which the batch selects how many are verified; None: the drafter chooses itself."""
        self._chosen = self.drafter.has_candidates
        return self.drafter.candidates(self.state, cost, num_others) if self._chosen else None

    def propose(self) -> Forest:
        return self.drafter.propose(self.state)

    def accept(self, draft: Forest, scored: Sequence[ScoredTree], last_position: int) -> StepResult:
        """What each request keeps of its tree, and its next root."""
        paths, next_roots = [], []
        for index, (request, tree) in enumerate(zip(self.requests, scored, strict=True)):
            parents = draft.shapes[index].parents
            path, root = list[int](), request.root
            with FailAlone(request):
                path, root = tree.accept(parents, last_position - len(request.text))
            paths.append(path)
            next_roots.append(root)
        return StepResult(
            draft,
            paths,
            next_roots,
            [tree.hidden_ND for tree in scored],
            [tree.logits_NV for tree in scored],
            _all_or_none([tree.argmax for tree in scored]),
            _all_or_none([tree.ranked_NR for tree in scored]),
            [tree.tokens for tree in scored],
            [tree.layers_NX for tree in scored if tree.layers_NX is not None],
            list(self.requests),
        )

    def go_on(self, step: StepResult, scored: Sequence[ScoredTree], timing: StepTiming) -> Emitted:
        """Tell the drafter, emit what was accepted, and move on to the next roots. `timing`: of the
        step so far."""
        self.drafter.observe(replace(step, timing=timing))
        emitted: Emitted = []
        for index, (request, path) in enumerate(zip(self.requests, step.paths, strict=True)):
            accepted, last = [scored[index].tokens[node] for node in path], path[-1] if path else 0
            request.text += [request.root, *accepted]
            request.root, request.hidden_1D = (
                step.next_roots[index],
                step.hidden[index][last : last + 1],
            )
            if request.finish_reason is not None:  # it failed
                continue
            with FailAlone(request):
                kept = request.take([*accepted, step.next_roots[index]])
                num_nodes = len(scored[index].tokens)
                together = timing.num_requests if self._chosen else 0
                request.count_step(len(kept), len(path), num_nodes, together)
                self._report(request, step, index, kept)
                if (near := scored[index].near_ties) is not None and request.counts_near_ties:
                    request.near_ties += sum(near[node] for node in [0, *path])
                emitted.append((request, kept))
        return emitted

    @staticmethod
    def _report(request: Request, step: StepResult, index: int, kept: Sequence[int]) -> None:
        """Give the request the scores and the tree of the step, where it asks for them."""
        path = step.paths[index]
        if (count := request.output_options.num_top_tokens) is not None:
            logits_NV = step.logits[index]
            nodes = to_device([0, *path], logits_NV.device)
            request.scores = token_scores(logits_NV[nodes], kept, count)
        if request.output_options.tree:
            parents, tokens = step.draft.shapes[index].parents, list(step.tokens(index))
            request.tree = VerifiedTree(list(parents), tokens, list(path[: len(kept)]))


def groups_of(requests: Sequence[Request]) -> list[Group]:
    """The requests of a step by their drafters."""
    groups = dict[int, Group]()
    for request in requests:
        drafter = request.drafter
        assert drafter is not None
        if id(drafter) in groups:
            groups[id(drafter)].requests.append(request)
        else:
            groups[id(drafter)] = Group(drafter, [request])
    return list(groups.values())


def drafts_of(
    groups: Sequence[Group], cost: StepCost | None, num_others: int = 0
) -> list[tuple[Group, Forest]]:
    """The next step's draft of each group whose drafter did not fail.

    `cost`: of steps, by which the draft tokens that gain are selected; None: drafters choose.
    `num_others`: tokens that the step reads in any case.
    """
    num_requests = sum(len(group.requests) for group in groups)
    candidates, drafts = dict[Group, Candidates](), dict[Group, Forest]()
    for group in groups:
        with FailAlone(*group.requests):
            others = num_others + num_requests - len(group.requests)
            found = None if cost is None else group.candidates(cost, others)
            if found is None:
                drafts[group] = group.propose()
            else:
                candidates[group] = found
    if cost is not None:
        fixed = num_others + sum(sum(draft.counts) for draft in drafts.values())
        all_chances = [chances for found in candidates.values() for chances in found.chances]
        counts = iter(choose_nodes(all_chances, fixed, cost).counts)
        for group, found in candidates.items():
            chosen = [next(counts) for _ in found.chances]
            with FailAlone(*group.requests):
                drafts[group] = found.select(chosen)
    return [(group, drafts[group]) for group in groups if group in drafts]


def _all_or_none(values: Sequence[T | None]) -> list[T] | None:
    known = [value for value in values if value is not None]
    return known or None


def by_request(
    nodes: Forest, scores: NodeScores, requests: Sequence[Request], ranks: int = 0
) -> list[ScoredTree]:
    """Each request's scored tree. `ranks`: how many of the likeliest tokens drafters read."""
    hidden_ND, layers_NX = scores.hidden_ND, scores.layers_NX
    read, alone = read_back(nodes, scores, requests, ranks), len(requests) == 1
    result, first = [], 0
    for request, count, drawn in zip(requests, nodes.counts, read.drawn, strict=True):
        nodes_of = slice(first, first + count)
        first += count
        argmax = None if read.argmax is None else read.argmax[nodes_of]
        result.append(
            ScoredTree(
                request.sampler,
                request.text,
                read.tokens[nodes_of],
                hidden_ND if alone else hidden_ND[nodes_of],
                scores.logits_NV if alone else scores.logits_NV[nodes_of],
                None if read.ranked_NR is None else read.ranked_NR[nodes_of],
                argmax,
                None if read.near_ties is None else read.near_ties[nodes_of],
                argmax if request.sampler.takes_argmax else drawn,
                layers_NX if alone or layers_NX is None else layers_NX[nodes_of],
            )
        )
    return result
