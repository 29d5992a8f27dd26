"""Requests that draft together, by one drafter, and where they stand."""

from collections.abc import Sequence

from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.drafter import Candidates, Drafter, State, StepResult
from medusa_kit.infer.decode.node_choice.choice import choose_nodes
from medusa_kit.infer.decode.node_choice.cost import StepCost
from medusa_kit.infer.decode.request import Emitted, FailAlone, Request
from medusa_kit.infer.decode.timing import StepTiming
from medusa_kit.infer.details import NOTHING, VerifiedTree, token_scores
from medusa_kit.infer.forest import Forest
from medusa_kit.transfer import to_device


class Group:
    """Requests of one step with the same drafter."""

    def __init__(self, drafter: Drafter, requests: list[Request]) -> None:
        self.drafter, self.requests = drafter, requests
        self._chosen = False

    def candidates(self, cost: StepCost, num_others: int) -> Candidates | None:
        """Draft tokens, of which the batch selects how many are verified; None: the drafter
        chooses itself."""
        self._chosen = self.drafter.has_candidates
        if not self._chosen:
            return None
        return self.drafter.candidates(State(self.requests), cost, num_others)

    def propose(self) -> Forest:
        return self.drafter.propose(State(self.requests))

    def accept(self, trees: Sequence[ScoredTree], last_position: int) -> None:
        """Find what each request keeps of its tree, and its next root."""
        for request, tree in zip(self.requests, trees, strict=True):
            tree.next_root, text = request.root, request.text
            try:
                tree.accept(request.sampler, text, last_position - len(text))
            except Exception as error:
                request.fail(error)

    def go_on(self, draft: Forest, trees: Sequence[ScoredTree], timing: StepTiming) -> Emitted:
        """Tell the drafter, emit what was accepted, and move on to the next roots. `timing`: of the
        step so far."""
        self.drafter.observe(StepResult(draft, trees, self.requests, timing))
        emitted: Emitted = []
        together = timing.num_requests if self._chosen else 0
        for request, tree in zip(self.requests, trees, strict=True):
            tokens, path = tree.tokens, tree.path
            following = [tokens[node] for node in path]
            request.text += (request.root, *following)
            request.root, request.hidden_ND = tree.next_root, tree.scores.hidden_ND
            request.hidden_row = tree.first + (path[-1] if path else 0)
            if request.finish_reason is not None:  # it failed
                continue
            following.append(tree.next_root)
            try:
                kept = request.take(following)
                request.count_step(len(kept), len(path), len(tokens), together)
                _report(request, tree, kept)
            except Exception as error:
                request.fail(error)
            else:
                emitted.append((request, kept))
        return emitted


def _report(request: Request, tree: ScoredTree, kept: Sequence[int]) -> None:
    """Give the request the scores and the tree of the step, where it asks for them, and count its
    near ties."""
    if tree.near_ties is not None and request.counts_near_ties:
        request.near_ties += sum(tree.near_ties[node] for node in [0, *tree.path])
    if request.output_options is NOTHING:
        return
    if (count := request.output_options.num_top_tokens) is not None:
        nodes = to_device([0, *tree.path], tree.logits_NV.device)
        request.scores = token_scores(tree.logits_NV[nodes], kept, count)
    if request.output_options.tree:
        accepted = tree.path[: len(kept)]
        request.tree = VerifiedTree(list(tree.parents), list(tree.tokens), accepted)


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
