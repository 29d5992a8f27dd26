"""A smaller causal LM as drafter (speculative decoding, arXiv 2211.17192): it drafts a few tokens
by forwards of its own, and the base verifies them in one forward.

The draft model runs like a base model, through a verifier and a tree cache of its own. So on a CPU
its steps run in C++, and a smaller drafter may draft for it (staged.py).

Shapes: B batch, N nodes with root, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.drafters.draft_model.chain import Chain
from medusa_kit.drafters.draft_model.lengths import Threshold
from medusa_kit.drafters.draft_model.loading import draft_verifier
from medusa_kit.drafters.draft_model.retokenized import Reader, Retokenized, SameIds
from medusa_kit.drafters.draft_model.runner import DraftRunner
from medusa_kit.drafters.draft_model.shared_vocabulary import Vocabulary, shared_vocabulary
from medusa_kit.drafters.draft_model.staged import Inside, build_inside
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.native import layer_drafts
from medusa_kit.drafters.native.dflash import DFlashDrafter
from medusa_kit.drafters.native.eagle import EagleDrafter
from medusa_kit.drafters.no_numbers import NoNumbers
from medusa_kit.drafters.tree_drafter import TreeDrafter, num_right
from medusa_kit.infer.decode.accept.rules import accept
from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.drafter import RequestText, State, StepResult
from medusa_kit.infer.outputs import NodeScores
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients
from medusa_kit.settings.drafters import DraftModelOptions
from medusa_kit.tree.draft_tree import DraftTree


@dataclass
class _Kept:
    """What is kept of a request. `slot`: of the draft model's cache; `inner`: its text in the draft
    model's ids, as the drafter inside sees it."""

    slot: int
    reader: Reader
    inner: RequestText
    chain: list[int] = field(default_factory=list)  # drafted, and not yet judged


class DraftModelDrafter(TreeDrafter):
    """Build with `build`."""

    name = "draft-model"
    runs_model = True
    rewinds = True  # a text may get shorter when drafts are taken back

    def __init__(
        self,
        base: BaseModel,
        verifier: Verifier,
        options: DraftModelOptions,
        vocabulary: Vocabulary,
        inside: Inside,
    ) -> None:
        super().__init__(base.device)
        self.base, self.verifier = base, verifier
        self.options, self.vocabulary, self.inside = options, vocabulary, inside
        cost = verifier.base.info.num_parameters / base.info.num_parameters
        self.threshold, self.runner = Threshold(options.threshold, cost), DraftRunner(verifier)
        self.num_nodes = min(options.num_nodes, 1 + options.max_length)
        if vocabulary.reads_text:  # the base may split the text into more tokens
            self.num_nodes = options.num_nodes
        self._drafts = self._drafted = self._accepted = 0
        self.no_numbers = NoNumbers(f"draft-model {verifier.base.info.name}")

    @property
    def num_forwards(self) -> int:
        """Forwards of the draft model over trees; reading a prompt does not count."""
        return self.runner.num_forwards

    @property
    def notes(self) -> list[str]:
        if not self._drafts:
            return self.no_numbers.notes
        return [
            *self.no_numbers.notes,
            f"draft model {self.verifier.base.info.name} ({self.vocabulary.kind} tokenizer): "
            f"{self.num_forwards} forwards, "
            f"{self._accepted / self._drafts:.2f} of {self._drafted / self._drafts:.2f} drafted "
            "tokens accepted on average",
            *self.inside.notes,
        ]

    def begin(self, request: RequestText) -> None:
        sampler = request.sampler if self._same_ids else None
        inner = RequestText(
            hidden_ND=torch.zeros(1, 0, dtype=torch.float32, device=self.runner.device),
            sampler=sampler,
        )
        slot = self.runner.begin()  # looks at the draft model
        self._look_at_vocabulary()
        request.kept[self] = _Kept(slot, self._reader(), inner)

    def finish(self, requests: Sequence[RequestText]) -> None:
        for own in [one.kept[self] for one in requests if self in one.kept]:
            self.runner.finish(own.slot)
            self.inside.finish(own.inner)

    def guess(self, state: State) -> list[DraftTree]:
        return self._judged(state, self._grow(state))

    def observe(self, step: StepResult) -> None:
        """Count how much of each chain was accepted, whichever draft it became part of."""
        for request, tree in zip(step.requests, step.trees, strict=True):
            own: _Kept = request.kept[self]
            if not own.chain:
                continue
            accepted = num_right(own.chain, tree)
            self.threshold.observe(len(own.chain), accepted)
            self._drafts += 1
            self._drafted += len(own.chain)
            self._accepted += accepted
            own.chain = []

    @no_gradients
    def _grow(self, state: State) -> list[Chain]:
        """Each request's draft, by forwards of the draft model until every one is long enough."""
        chains = [self._chain(one) for one in state.requests]
        slots = [one.kept[self].slot for one in state.requests]
        self.runner.follow(slots, [None if chain.done else chain.text for chain in chains])
        inner, first = [one.kept[self].inner for one in state.requests], True
        while not all(chain.done for chain in chains):
            self._forward(chains, inner, first)
            first = False
        self.no_numbers.seen |= any(chain.no_numbers for chain in chains)
        return chains

    def _forward(self, chains: Sequence[Chain], inner: Sequence[RequestText], first: bool) -> None:
        """One forward: the inner drafter proposes, the draft model verifies, the cache commits."""
        for one, chain in zip(inner, chains, strict=True):
            one.text = chain.whole_text[:-1] if self.inside.needs_state else []
            one.root = chain.newest
        draft = self.inside.propose(State(inner), first)
        hidden, logits = self.runner.verify(draft)
        tokens, paths = draft.token_lists(), list[list[int] | None]()
        for row, chain in enumerate(chains):
            if chain.done:
                paths.append(None)
                continue
            parents, logits_NU = draft.shapes[row].parents, logits[row]
            extend = partial(_extend, chain, logits_NU)
            paths.append(accept(tokens[row], parents, extend, len(parents))[0])
        self.runner.commit(draft, paths)
        if self.inside.needs_state:
            trees = list[ScoredTree]()
            for row, (chain, path) in enumerate(zip(chains, paths, strict=True)):
                parents = draft.shapes[row].parents
                tree = ScoredTree(tokens[row], parents, NodeScores(hidden[row], logits[row]))
                tree.path, tree.next_root = path or [], chain.newest
                trees.append(tree)
            self.inside.observe(StepResult(draft, trees, inner))

    def _chain(self, request: RequestText) -> Chain:
        """An empty draft after the root, as long as lengths and both contexts allow."""
        own: _Kept = request.kept[self]
        prefix = [*request.text, request.root]
        text = own.reader.read(prefix)
        contexts = self.base.info.context_length, self.verifier.base.info.context_length
        limit = min(
            self.options.max_length,
            self.options.num_nodes - 1,
            contexts[0] - len(prefix),
            contexts[1] - len(text) + 1,
        )
        in_text = self.vocabulary.reads_text
        return Chain(
            text,
            prefix,
            self.vocabulary,
            self.threshold,
            limit if text else 0,
            (self.verifier.base if in_text else self.base).stop_token_ids,
            None if in_text else request.sampler,
        )

    def _judged(self, state: State, chains: Sequence[Chain]) -> list[DraftTree]:
        """The draft for the base to verify; remembers the chains, to count how much of them is
        accepted."""
        trees = []
        for request, chain in zip(state.requests, chains, strict=True):
            own: _Kept = request.kept[self]
            in_text = self.vocabulary.reads_text
            tree = self._translated(own.reader, chain) if in_text else chain.tree
            trees.append(tree)
            own.chain = _first_children(tree)
        return trees

    def _translated(self, reader: Reader, chain: Chain) -> DraftTree:
        """The chain in the base's tokens, which share its chance evenly."""
        tree = DraftTree(chain.tree.tokens[0])
        if not chain.own_ids:
            return tree
        tokens = reader.back(chain.up_to_root, chain.own_ids, chain.text)
        tokens = tokens[: self.num_nodes - 1]
        chance = chain.chance ** (1 / max(len(tokens), 1))
        tree.add_chain(tokens, chance, ("draft-model", "text", round(4 * chance)))
        return tree

    @property
    def _same_ids(self) -> bool:
        vocabulary = self.vocabulary
        return vocabulary.kind == "same" and vocabulary.base_size == vocabulary.draft_size

    def _look_at_vocabulary(self) -> None:
        """Either model may have other rows than when the drafter was made."""
        base, draft, known = self.base, self.verifier.base, self.vocabulary
        sizes = base.info.vocab_size, draft.info.vocab_size
        if sizes == (known.base_size, known.draft_size):
            return
        if known.kind == "same":
            self.vocabulary = Vocabulary("same", *sizes)
        else:
            self.vocabulary = shared_vocabulary(self.options.tokenizer, base, draft)

    def _reader(self) -> Reader:
        if self.vocabulary.reads_text:
            sizes = self.vocabulary.base_size, self.vocabulary.draft_size
            return Retokenized(self.base.tokenizer, self.verifier.base.tokenizer, *sizes)
        return SameIds(self.vocabulary)


def _extend(chain: Chain, logits_NU: Tensor, node: int) -> int:
    return chain.extend(logits_NU[node])


def _first_children(tree: DraftTree) -> list[int]:
    """Tokens of the chain: at each node the first child."""
    chain, tip = list[int](), 0
    for node, parent in enumerate(tree.parents):
        if node and parent == tip:
            chain.append(tree.tokens[node])
            tip = node
    return chain


def build(
    context: DraftContext, options: DraftModelOptions
) -> DraftModelDrafter | DFlashDrafter | EagleDrafter:
    """Raises ConfigError where no draft model is named or tokenizers or options do not fit, and
    what load_base_model raises."""
    if isinstance(name := context.draft_model, str):
        read = partial(layer_drafts.draft_config, name)
        config = context.memory.loaded.remembered(("config of a draft", name), read)
        if config is not None:
            return layer_drafts.build(context, name, config, options)
    verifier = draft_verifier(context)
    vocabulary = context.memory.loaded.remembered(
        ("draft vocabulary", id(verifier), options.tokenizer),
        lambda: shared_vocabulary(options.tokenizer, context.base, verifier.base),
    )
    inside = build_inside(context, verifier, options.staged)
    return DraftModelDrafter(context.base, verifier, options, vocabulary, inside)
