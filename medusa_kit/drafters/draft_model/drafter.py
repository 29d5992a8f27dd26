"""A smaller causal LM as drafter (speculative decoding, arXiv 2211.17192): it drafts a few tokens
by forwards of its own, and the base verifies them in one forward.

The draft model runs like a base model, through a verifier and a tree cache of its own. So on a CPU
its steps run in C++, and a smaller drafter may guess for it in turn (staged.py).

Shapes: B batch, N nodes with root, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.drafters.draft_model.chain import Chain
from medusa_kit.drafters.draft_model.lengths import lengths_for
from medusa_kit.drafters.draft_model.loading import draft_verifier
from medusa_kit.drafters.draft_model.retokenized import Reader, Retokenized, SameIds
from medusa_kit.drafters.draft_model.runner import DraftRunner
from medusa_kit.drafters.draft_model.shared_vocabulary import Vocabulary, shared_vocabulary
from medusa_kit.drafters.draft_model.staged import Inside, build_inside
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.native import layer_drafts
from medusa_kit.drafters.native.dflash import DFlashDrafter
from medusa_kit.drafters.native.eagle import EagleDrafter
from medusa_kit.drafters.trie import Trie, TrieDrafter, num_right
from medusa_kit.errors import ConfigError
from medusa_kit.infer.accept.rules import accept
from medusa_kit.infer.accept.sampler import Sampler
from medusa_kit.infer.draft import State, StepResult
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients
from medusa_kit.settings.drafters import DraftModelOptions


class DraftModelDrafter(TrieDrafter):
    """Build with `build`."""

    name = "draft-model"
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
        self._chains: list[list[int]] = []  # of each row: guessed, and not yet judged
        self._readers: list[Reader] = []
        cost = verifier.base.info.num_parameters / base.info.num_parameters
        self.lengths, self.runner = lengths_for(options, cost), DraftRunner(verifier)
        self.num_nodes = min(options.num_nodes, 1 + options.width * self.lengths.longest)
        if vocabulary.kind == "text":  # the base may split the text into more tokens
            self.num_nodes = options.num_nodes
        self._drafts = self._drafted = self._accepted = 0

    @property
    def num_forwards(self) -> int:
        """Forwards of the draft model over trees; reading a prompt does not count."""
        return self.runner.num_forwards

    @property
    def notes(self) -> list[str]:
        if not self._drafts:
            return []
        return [
            f"draft model {self.verifier.base.info.name} ({self.vocabulary.kind} tokenizer): "
            f"{self.num_forwards} forwards, "
            f"{self._accepted / self._drafts:.2f} of {self._drafted / self._drafts:.2f} drafted "
            "tokens accepted on average",
            *self.inside.notes,
        ]

    def join(self, state: State) -> None:
        for joined in (self.runner, self.lengths):
            joined.join(len(state.tokens))
        self._chains += [[] for _ in state.tokens]
        self._readers += [self._reader() for _ in state.tokens]

    def guess(self, state: State) -> list[Trie]:
        return self._finish(self._grow(state))

    def observe(self, step: StepResult) -> None:
        """Count how much of each chain was accepted, whichever draft it became part of."""
        for row, (chain, path) in enumerate(zip(self._chains, step.paths, strict=True)):
            if not chain:
                continue
            accepted = num_right(chain, path, step.tokens(row))
            self.lengths.observe(row, len(chain), accepted)
            self._drafts += 1
            self._drafted += len(chain)
            self._accepted += accepted
        self._chains = [[] for _ in self._chains]

    def select_rows(self, rows: Sequence[int]) -> None:
        self.runner.select_rows(rows)
        self.lengths.select_rows(rows)
        self.inside.select_rows(rows)
        self._chains = [self._chains[row] for row in rows]
        self._readers = [self._readers[row] for row in rows]

    @no_gradients
    def _grow(self, state: State) -> list[Chain]:
        """Each row's draft, by forwards of the draft model until every row has enough."""
        chains = [self._chain(state, row) for row in range(len(state.tokens))]
        self.runner.follow([None if chain.done else chain.text for chain in chains])
        samplers = state.samplers if self._same_ids else ()
        first = True
        while not all(chain.done for chain in chains):
            self._forward(chains, samplers, first)
            first = False
        return chains

    def _forward(self, chains: Sequence[Chain], samplers: Sequence[Sampler], first: bool) -> None:
        """One forward: the inner drafter guesses, the draft model verifies, the cache commits."""
        texts = [chain.whole_text if self.inside.needs_state else [] for chain in chains]
        roots = [chain.newest for chain in chains]
        hidden_BD = torch.zeros(len(chains), 0, device=self.runner.device)
        inner = State([text[:-1] for text in texts], roots, hidden_BD, samplers)
        draft = self.inside.propose(inner, first)
        hidden, logits = self.runner.verify(draft)
        tokens_BN, paths = draft.tokens_BN.tolist(), list[list[int] | None]()
        for row, chain in enumerate(chains):
            if chain.done:
                paths.append(None)
                continue
            parents, logits_NU = draft.topologies[row].parents, logits[row]
            extend = partial(_extend, chain, logits_NU)
            paths.append(accept(tokens_BN[row], parents, extend, len(parents))[0])
        self.runner.commit(draft, paths)
        if self.inside.needs_state:
            kept = [path or [] for path in paths]
            nexts = [chain.newest for chain in chains]
            self.inside.observe(StepResult(draft, kept, nexts, hidden, logits))

    def _chain(self, state: State, row: int) -> Chain:
        """An empty draft after the row's root, as long as lengths and both contexts allow."""
        prefix = [*state.tokens[row], state.roots_B[row]]
        text = self._readers[row].read(prefix)
        contexts = self.base.info.context_length, self.verifier.base.info.context_length
        limit = min(
            self.lengths.limit(row),
            self.options.num_nodes - 1,
            contexts[0] - len(prefix),
            contexts[1] - len(text) + 1,
        )
        in_text = self.vocabulary.kind == "text"
        sampler = state.samplers[row] if state.samplers and not in_text else None
        return Chain(
            text,
            prefix,
            self.vocabulary,
            self.lengths,
            limit if text else 0,
            self.options.width,
            (self.verifier.base if in_text else self.base).stop_token_ids,
            sampler,
        )

    def _finish(self, chains: Sequence[Chain]) -> list[Trie]:
        """The draft for the base to verify; remembers the chains, to count how much of them is
        accepted."""
        tries = []
        for row, chain in enumerate(chains):
            if self.vocabulary.kind == "text":
                trie = self._translated(row, chain)
            else:
                trie = chain.trie.best(self.num_nodes)
            tries.append(trie)
            self._chains[row] = _first_children(trie)
        return tries

    def _translated(self, row: int, chain: Chain) -> Trie:
        """The chain in the base's tokens, which share its chance evenly."""
        trie = Trie(chain.trie.tokens[0])
        if not chain.own_ids:
            return trie
        said = self._readers[row].back(chain.up_to_root, chain.own_ids, chain.text)
        said = said[: self.num_nodes - 1]
        chance = chain.chance ** (1 / max(len(said), 1))
        trie.add_chain(said, chance, ("draft-model", "text", round(4 * chance)))
        return trie

    @property
    def _same_ids(self) -> bool:
        vocabulary = self.vocabulary
        return vocabulary.kind == "same" and vocabulary.base_size == vocabulary.draft_size

    def _reader(self) -> Reader:
        if self.vocabulary.reads_text:
            sizes = self.vocabulary.base_size, self.vocabulary.draft_size
            return Retokenized(self.base.tokenizer, self.verifier.base.tokenizer, *sizes)
        return SameIds(self.vocabulary)


def _extend(chain: Chain, logits_NU: Tensor, node: int) -> int:
    return chain.extend(logits_NU[node])


def _first_children(trie: Trie) -> list[int]:
    """Tokens of the chain: at each node the first child."""
    chain, tip = list[int](), 0
    for node, parent in enumerate(trie.parents):
        if node and parent == tip:
            chain.append(trie.tokens[node])
            tip = node
    return chain


def build(
    context: DraftContext, options: DraftModelOptions
) -> DraftModelDrafter | DFlashDrafter | EagleDrafter:
    """Raises ConfigError where no draft model is named or tokenizers or options do not fit, and
    what load_base_model raises."""
    if isinstance(name := context.draft_model, str):
        read = partial(layer_drafts.draft_config, name)
        config = context.remembered(("config of a draft", name), read)
        if config is not None:
            return layer_drafts.build(context, name, config, options)
    verifier = draft_verifier(context)
    text_will_do = options.width == 1
    vocabulary = context.remembered(
        ("draft vocabulary", id(verifier), options.tokenizer, text_will_do),
        lambda: shared_vocabulary(options.tokenizer, context.base, verifier.base, text_will_do),
    )
    if vocabulary.kind == "text" and not text_will_do:
        raise ConfigError(
            f"drafter draft-model: width {options.width} is impossible where drafts are exchanged "
            f"as text, as between {verifier.base.info.name!r} and {context.base.info.name!r}",
            hint="use width 1, or a draft model with a more similar tokenizer",
        )
    inside = build_inside(context, verifier, options.staged)
    return DraftModelDrafter(context.base, verifier, options, vocabulary, inside)
