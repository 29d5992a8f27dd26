"""A DFlash draft as drafter (arXiv 2602.06036): all tokens of a draft in one forward.

The draft reads what several of the base's layers put out at true tokens, and mask tokens behind the
root. Model, cache and draft tokens are transformers' own (`DFlashTokenCandidateGenerator`), one for
each row; this brings them what the layers put out.

Shapes: T tokens of a row that its draft has not read, D hidden, X all watched layers' D, N nodes of
a draft without root, V vocabulary.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.native.dflash_files import layers_read, load_dflash
from medusa_kit.drafters.native.other_kinds import DFLASH, check_options
from medusa_kit.drafters.native.tally import Tally
from medusa_kit.drafters.no_numbers import NoNumbers
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.infer.decode.drafter import RequestText, State, StepResult
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients
from medusa_kit.settings.drafters import DraftModelOptions
from medusa_kit.transfer import to_device
from medusa_kit.tree.draft_tree import DraftTree


@dataclass
class _Kept:
    """What is kept of a request. `seen`: outputs_TX of its tokens that are not read yet."""

    generator: Any  # transformers' own
    seen: list[Tensor]


class DFlashDrafter(TreeDrafter):
    """`model`: transformers' draft model. What rows have seen since their last draft is read with
    the next one."""

    name = "draft-model"

    def __init__(self, verifier: Verifier, model: Any, called: str, num_nodes: int) -> None:
        super().__init__(verifier.base.device)
        self.verifier, self.base, self.model = verifier, verifier.base, model
        self.num_nodes = min(num_nodes, model.config.block_size)
        self.watches = layers_read(model.config)
        self.tally = Tally(f"draft model {called} (DFlash)")
        self.no_numbers = NoNumbers(f"DFlash draft {called}")

    @property
    def notes(self) -> list[str]:
        return [*self.no_numbers.notes, *self.tally.notes]

    def begin(self, request: RequestText) -> None:
        assert request.prompt_layers is not None, "the base gave no outputs of layers"
        request.kept[self] = _Kept(self._generator(), [request.prompt_layers])

    def observe(self, step: StepResult) -> None:
        """Keep what the layers put out at accepted tokens, whoever drafted them."""
        for request, tree in zip(step.requests, step.trees, strict=True):
            outputs_NX, own = tree.layers_NX, request.kept[self]
            assert outputs_NX is not None, "the base gave no outputs of layers"
            own.seen.append(outputs_NX[to_device([0, *tree.path], outputs_NX.device)])
        self.tally.observe(step)

    @no_gradients
    def guess(self, state: State) -> list[DraftTree]:
        return self.tally.guessed([self._guess(one) for one in state.requests])

    def _guess(self, request: RequestText) -> DraftTree:
        tokens, root = request.text, request.root
        tree = DraftTree(root)
        room = self.base.info.context_length - 1 - len(tokens)
        if room < 1:
            return tree
        logits_NV = self._read(request.kept[self], [*tokens, root])[: min(room, self.num_nodes - 1)]
        chances_N, tokens_N = logits_NV.float().softmax(-1).max(-1)
        chances, path = self.no_numbers.none_for(chances_N.tolist()), 1.0
        for depth, (token, chance) in enumerate(zip(tokens_N.tolist(), chances, strict=True)):
            key = (self.name, "DFlash", min(depth, 4), round(4 * chance))
            tree.add(depth, token, chance, key)
            path *= chance
            if path < self._min_chance:  # what follows would not pay
                break
        return tree

    def _read(self, own: _Kept, text: list[int]) -> Tensor:
        """logits_NV of the draft behind a text, whose last token is the root."""
        outputs_TX, own.seen = torch.cat(own.seen), []
        parts = outputs_TX.split(self.base.info.hidden_size, dim=-1)
        # As it asks for them: after the embedding, which is the first of hidden states.
        hidden = {
            layer + 1: part_TD[None] for layer, part_TD in zip(self.watches, parts, strict=True)
        }
        T = len(outputs_TX)
        ids_1T = to_device(text[-T - 1 :], self.device)[None]
        positions_1T = torch.arange(len(text), device=self.device)[None]
        with self.verifier.lock():  # the base's embedding may be set to embed without its norm
            _, logits_1NV = own.generator.get_candidates(
                ids_1T,
                {"position_ids": positions_1T, "attention_mask": None},
                SimpleNamespace(hidden_states=hidden),
                is_first_iteration=False,
                n_last_matches=T - 1,
            )
        return self.base.scale_logits(logits_1NV[0])

    def _generator(self) -> Any:
        from transformers import GenerationConfig
        from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

        inner = self.base.own_model
        # It is given the tokens alone that its draft has not read, however long the text is.
        settings = GenerationConfig(max_length=2 * self.base.info.context_length, do_sample=False)
        return DFlashTokenCandidateGenerator(
            self.model, inner.get_input_embeddings(), inner.get_output_embeddings(), settings
        )


def build(
    context: DraftContext, name: str, config: Any, options: DraftModelOptions
) -> DFlashDrafter:
    """Raises ConfigError for options that a DFlash draft has no use for, and as `load_dflash`."""
    check_options(name, DFLASH, options)
    key = ("DFlash draft", name)
    model = context.memory.loaded.remembered(key, lambda: load_dflash(name, config, context.base))
    return DFlashDrafter(context.verifier, model, name, options.num_nodes)
