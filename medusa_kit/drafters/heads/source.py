"""Trees of heads, each draft token with its chance, to be merged with others or verified as
far as it pays.

Where the tree is grown anew at each step, the heads say how probable each draft token is now, and
what was so probable and so deep before says how often it was right. In a static tree the chance of
a node is how often that node was right so far.
"""

import math
from collections.abc import Sequence

from medusa_kit.drafters.estimates import CLASSES, AcceptanceEstimate, chance_class
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.medusa import HeadsDrafter
from medusa_kit.drafters.heads.static_chances import own_chances
from medusa_kit.drafters.no_numbers import NoNumbers
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.heads.guesser import MinLogProbs
from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.scores import scored_guesses, scored_guesses_after
from medusa_kit.infer.decode.drafter import State, StepResult
from medusa_kit.infer.forest import Forest
from medusa_kit.no_gradients import no_gradients
from medusa_kit.transfer import to_device
from medusa_kit.tree.draft_tree import DraftTree

DRAWN = "drawn"  # tokens that will be drawn are counted apart
# A path gets children from this many times the chance on that a draft token must have: children are
# less likely, and naming them takes time.
EXPAND_FACTOR = 3.5
# Drafts in a row without a right token, after which heads are looked at for NaN: on the host, and
# on a device, which the host then waits for once.
SUSPECT, SUSPECT_ON_DEVICE = 4, 16
HIGHEST = 1 - 1 / CLASSES  # of these chances: paths of the surest class always do


class HeadsSource(TreeDrafter):
    name = "medusa"
    runs_model = True

    def __init__(
        self, inner: HeadsDrafter | DynamicDrafter, calibrated: Sequence[float] | None = None
    ) -> None:
        """`calibrated`: the share of steps that accepted each node below the root, where known."""
        super().__init__(inner.heads.base.device)
        self.inner, self.num_nodes, self._calibrated = inner, inner.num_nodes, calibrated
        self.is_foreseen = isinstance(inner, HeadsDrafter) and calibrated is not None
        self._min_scores = MinLogProbs()
        # Of a static tree: how likely each node is, given its parent, before any step.
        self._believed = list[float]()
        if isinstance(inner, HeadsDrafter):
            self._believed = own_chances(inner.tree, calibrated)
        self._nodes: list[int] | None = None  # of a static tree that are named; None: all
        self.no_numbers, self._in_vain = NoNumbers("heads"), 0  # drafts of which none was right
        self._drafted = False  # in this step
        self._suspect = SUSPECT if self.device.type == "cpu" else SUSPECT_ON_DEVICE

    def set_min_chance(
        self, min_chance: float, acceptance: AcceptanceEstimate, next_chance: float = 0.0
    ) -> None:
        """Name no paths with a lower chance from now on. In a dynamic tree only paths so likely get
        children that these may pay after another pass of the heads. Of a static tree the nodes are
        named that were right often enough by `acceptance`, at least the likeliest."""
        if isinstance(self.inner, HeadsDrafter):
            self._nodes = self._likely_nodes(self.inner, max(min_chance, next_chance), acceptance)
            return
        keep, expand = (
            math.log(min(chance, HIGHEST)) if chance > 0 else -math.inf
            for chance in (min_chance, max(EXPAND_FACTOR * min_chance, next_chance))
        )
        self._min_scores = MinLogProbs(keep, expand)

    def expected(self, acceptance: AcceptanceEstimate) -> Sequence[float] | None:
        """As calibrated; of a static tree as far as `acceptance` knows no better."""
        if isinstance(self.inner, HeadsDrafter) and self._calibrated is not None:
            return self._chances(self.inner, acceptance)[1:]
        return self._calibrated

    def _chances(self, inner: HeadsDrafter, acceptance: AcceptanceEstimate) -> list[float]:
        """How likely each node of a static tree is, with all of its path."""
        chances = [1.0]
        for node in range(1, self.num_nodes):
            own = acceptance.chance((self.name, node), self._believed[node])
            chances.append(chances[inner.tree.parents[node]] * own)
        return chances

    def _likely_nodes(
        self, inner: HeadsDrafter, least_chance: float, acceptance: AcceptanceEstimate
    ) -> list[int]:
        """Below the root, in rising order; parents are among them, being no less likely."""
        below, chances = range(1, self.num_nodes), self._chances(inner, acceptance)
        likeliest = max(below, key=lambda node: chances[node], default=0)
        return [n for n in below if n == likeliest or chances[n] >= least_chance]

    def describe(self) -> str:
        return self.inner.name

    @property
    def notes(self) -> list[str]:
        return self.no_numbers.notes

    def propose(self, state: State) -> Forest:
        """The whole tree for each request."""
        self._drafted = True
        return self.inner.propose(state)

    def guess(self, state: State) -> list[DraftTree]:
        self._drafted = True
        if isinstance(self.inner, DynamicDrafter):
            return self._grown(self.inner, state)
        nodes = list(range(1, self.num_nodes)) if self._nodes is None else self._nodes
        draft, parents = self.inner.propose_nodes(state, nodes), self.inner.tree.parents
        return [self._tree(tokens, nodes, parents) for tokens in draft.token_lists()]

    def _grown(self, inner: DynamicDrafter, state: State) -> list[DraftTree]:
        draws = state.draws()
        texts = inner.texts(state)
        grown = inner.grow(state.hidden_BD, state.roots_B, self._min_scores, draws, texts)
        trees, drawn = [], [one is not None for one in draws or [None] * len(grown)]
        for (tokens, parents, scores), is_drawn in zip(grown, drawn, strict=True):
            tree, depths = DraftTree(tokens[0]), [0]
            for node in range(1, len(parents)):
                parent = parents[node]
                depths.append(depths[parent] + 1)
                chance = math.exp(min(scores[node] - scores[parent], 0.0))
                kind = (depths[node], chance_class(chance))
                key = (self.name, *kind, DRAWN) if is_drawn else (self.name, *kind)
                tree.add(parent, tokens[node], chance, key)
            trees.append(tree)
        return trees

    def _tree(
        self, tokens: Sequence[int], nodes: Sequence[int], parents: Sequence[int]
    ) -> DraftTree:
        """The draft tree of these nodes of a static tree, whose tokens follow the root's."""
        tree, node_of = DraftTree(tokens[0]), {0: 0}
        for node, token in zip(nodes, tokens[1:], strict=True):
            above = node_of[parents[node]]
            node_of[node] = tree.add(above, token, self._believed[node], (self.name, node))
        return tree

    def observe(self, step: StepResult) -> None:
        self.inner.observe(step)
        if self._drafted and self._in_vain < self._suspect:
            self._in_vain = 0 if self._was_right(step) else self._in_vain + 1
            if self._in_vain == self._suspect:
                state = State(step.requests)
                self.no_numbers.seen = computes_no_numbers(self.inner.heads, state)
        self._drafted = False

    def _was_right(self, step: StepResult) -> bool:
        """Whether a token of these heads was accepted."""
        paths = zip(step.requests, step.paths, strict=True)
        return any(path if one.credits is None else self.name in one.credits for one, path in paths)


@no_gradients
def computes_no_numbers(heads: MedusaHeads, state: State) -> bool:
    """Whether what heads compute for these requests, the first one where each follows the one
    before, is NaN or infinite. A static tree has tokens alone, so this is looked at where none of
    them is right; weights are not read for it, which would take as long as some steps."""
    if heads.one_pass:
        _, scores = scored_guesses(heads, state.hidden_BD, 1, [1.0] * heads.num_heads)
    else:
        paths_B1 = to_device(state.roots_B, state.hidden_BD.device)[:, None]
        _, scores = scored_guesses_after(heads, 0, state.hidden_BD, paths_B1, 1, 1.0)
    return bool((scores == -math.inf).any())
