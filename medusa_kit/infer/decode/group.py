"""Requests that draft together, by one drafter, and where they stand."""

from collections.abc import Sequence

from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.drafter import Candidates, Drafter, State, StepResult
from medusa_kit.infer.decode.node_choice.choice import choose_nodes
from medusa_kit.infer.decode.node_choice.cost import StepCost
from medusa_kit.infer.decode.request import Emitted, FailAlone, Request
from medusa_kit.infer.decode.timing import StepTiming
from medusa_kit.infer.details import VerifiedTree, token_scores
from medusa_kit.infer.forest import Forest
from medusa_kit.transfer import to_device


class Group:
    """Requests of one step with the same drafter."""

    def __init__(self, drafter: Drafter, requests: list[Request]) -> None:
        self.drafter, self.requests = drafter, requests
        self._chosen = False

    def candidates(self, cost: StepCost, num_others: int) -> Candidates | None:
        """Of which the batch selects how many are verified; None: the drafter chooses itself."""
        self._chosen = self.drafter.has_candidates
        if not self._chosen:
            return None
        return self.drafter.candidates(State(self.requests), cost, num_others)

    def propose(self) -> Forest:
        return self.drafter.propose(State(self.requests))

    def accept(self, trees: Sequence[ScoredTree], last_position: int) -> None:
        """Find what each request keeps of its tree, and its next root."""
        for request, tree in zip(self.requests, trees, strict=True):
            tree.next_root = request.root
            with FailAlone(request):
                tree.accept(request.sampler, request.text, last_position - len(request.text))

    def go_on(self, draft: Forest, trees: Sequence[ScoredTree], timing: StepTiming) -> Emitted:
        """Tell the drafter, emit what was accepted, and move on to the next roots. `timing`: of the
        step so far."""
        self.drafter.observe(StepResult(draft, trees, self.requests, timing))
        emitted: Emitted = []
        for request, tree in zip(self.requests, trees, strict=True):
            accepted, last = [tree.tokens[node] for node in tree.path], [0, *tree.path][-1]
            request.text += [request.root, *accepted]
            request.root, request.hidden_1D = tree.next_root, tree.hidden_ND[last : last + 1]
            if request.finish_reason is not None:  # it failed
                continue
            with FailAlone(request):
                kept = request.take([*accepted, tree.next_root])
                together = timing.num_requests if self._chosen else 0
                request.count_step(len(kept), len(tree.path), len(tree.tokens), together)
                _report(request, tree, kept)
                if tree.near_ties is not None and request.counts_near_ties:
                    request.near_ties += sum(tree.near_ties[node] for node in [0, *tree.path])
                emitted.append((request, kept))
        return emitted


def _report(request: Request, tree: ScoredTree, kept: Sequence[int]) -> None:
    """Give the request the scores and the tree of the step, where it asks for them."""
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
