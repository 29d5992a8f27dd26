"""The base's own layers for multi-token prediction (MTP) as drafter (arXiv 2412.19437, 2.2).

A layer reads the hidden state at a position and the token after it, and predicts the token after
that. Each layer reads the one before it; where a draft is longer than there are layers, the last
one goes on from its own output.

Each layer keeps keys and values of the whole text so far, computed from true tokens only: those of
draft tokens are forgotten after each draft.

Shapes: B batch, T nodes of a row, N nodes of a draft with root, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.native.layer_rows import LayerCache, LayerRows
from medusa_kit.drafters.native.mtp_layers import layers_or_error
from medusa_kit.drafters.no_numbers import NoNumbers
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.drafter import RequestText, State, StepResult
from medusa_kit.no_gradients import no_gradients
from medusa_kit.settings.drafters import MtpOptions
from medusa_kit.transfer import to_device
from medusa_kit.tree.draft_tree import DraftTree

PIECE = 512  # nodes that a layer reads at once


@dataclass
class _Kept:
    """What is kept of a request. `slots`: of each layer's cache. `outputs`: after each layer, its
    output at the root; None: it has not read so far."""

    slots: list[int]
    tokens: list[int]  # to be read; the last one is the root
    hidden_TD: Tensor  # before each of them
    outputs: list[Tensor | None]


class MtpDrafter(TreeDrafter):
    """What requests have seen since their last draft is read with the next one."""

    name = kind = "mtp"  # `kind`: of its draft tokens, whose acceptance is estimated
    reads_prompts = True
    runs_model = True

    def __init__(self, base: BaseModel, layers: Sequence[LayerRows], num_tokens: int) -> None:
        super().__init__(base.device)
        self.base, self.layers, self.num_nodes = base, layers, 1 + num_tokens
        self.no_numbers = NoNumbers("MTP layers")

    @property
    def notes(self) -> list[str]:
        return self.no_numbers.notes

    def begin(self, request: RequestText) -> None:
        hidden_TD = self._of_prompt(request)
        tokens = [*request.text, request.root][-len(hidden_TD) :]
        own = _Kept([], tokens, self._own(hidden_TD), [None] * len(self.layers))
        request.kept[self] = own  # before its slots, which `finish` gives back whatever fails
        own.slots += (layer.begin() for layer in self.layers)

    def finish(self, requests: Sequence[RequestText]) -> None:
        for own in [one.kept[self] for one in requests if self in one.kept]:
            for layer, slot in zip(self.layers, own.slots, strict=False):
                layer.finish(slot)

    def observe(self, step: StepResult) -> None:
        """Keep what was accepted, whoever drafted it."""
        for request, tree in zip(step.requests, step.trees, strict=True):
            own: _Kept = request.kept[self]
            hidden_ND = self._of_nodes(tree)
            seen_TD = self._own(hidden_ND[to_device([0, *tree.path], hidden_ND.device)])
            own.hidden_TD = torch.cat([own.hidden_TD, seen_TD])
            own.tokens += [*(tree.tokens[node] for node in tree.path), tree.next_root]

    @no_gradients
    def guess(self, state: State) -> list[DraftTree]:
        ends = [len(tokens) for tokens in state.tokens]
        kept = [one.kept[self] for one in state.requests]
        self._read_on(kept, ends)
        trees = [DraftTree(root) for root in state.roots_B]
        limits = [min(self.num_nodes - 1, self.base.info.context_length - 1 - end) for end in ends]
        true = [layer.lengths for layer in self.layers]
        self._draft(kept, trees, limits, ends)
        for layer, lengths in zip(self.layers, true, strict=True):
            layer.forget_after(lengths)
        return trees

    def _of_prompt(self, request: RequestText) -> Tensor:
        """What layers read at the last tokens of its prompt, before `_own`."""
        found = request.hidden_1D if request.prompt_hidden is None else request.prompt_hidden
        assert found is not None, "the base gave no hidden state"
        return found

    def _of_nodes(self, tree: ScoredTree) -> Tensor:
        """The same at the nodes of a draft."""
        return tree.hidden_ND

    def _own(self, hidden_TD: Tensor) -> Tensor:
        """What the layers read of these."""
        return hidden_TD

    def _likeliest(self, hidden_BD: Tensor) -> tuple[Tensor, Tensor]:
        """(chances_B, tokens_B) after what a layer has put out."""
        logits_BV = self.base.head_logits(hidden_BD).float()
        chances_B, tokens_B = logits_BV.softmax(-1).max(-1)
        return chances_B, tokens_B

    def _read_on(self, kept: Sequence[_Kept], ends: Sequence[int]) -> None:
        """Let the layers read what is true up to the roots, which are at positions `ends`."""
        while some := [(own, end) for own, end in zip(kept, ends, strict=True) if own.tokens]:
            tokens = [own.tokens[:PIECE] for own, _ in some]
            hidden = [own.hidden_TD[:PIECE] for own, _ in some]
            for own, _ in some:
                own.tokens, own.hidden_TD = own.tokens[PIECE:], own.hidden_TD[PIECE:]
            at = [end - len(own.tokens) for own, end in some]
            self._read([own for own, _ in some], tokens, hidden, at)

    def _read(
        self,
        kept: list[_Kept],
        tokens: list[list[int]],
        hidden: list[Tensor],
        ends: list[int],
    ) -> None:
        for index, layer in enumerate(self.layers):
            outputs = layer.read([own.slots[index] for own in kept], hidden, tokens, ends)
            # The next layer reads this one's output before each token.
            hidden = [
                torch.cat([*_known(own.outputs[index]), out_TD[:-1]])
                for own, out_TD in zip(kept, outputs, strict=True)
            ]
            for own, out_TD in zip(kept, outputs, strict=True):
                own.outputs[index] = out_TD[-1:]
            some = [index for index, one_TD in enumerate(hidden) if len(one_TD)]
            kept, ends = [kept[index] for index in some], [ends[index] for index in some]
            hidden = [hidden[index] for index in some]
            pairs = zip((tokens[index] for index in some), hidden, strict=True)
            tokens = [one[len(one) - len(one_TD) :] for one, one_TD in pairs]

    def _draft(
        self,
        kept: Sequence[_Kept],
        trees: Sequence[DraftTree],
        limits: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """Grow a chain in each tree, of at most so many tokens, behind the root at `ends`."""
        found: dict[int, list[Tensor]] = {  # what the layer at hand puts out: at the root, and on
            row: _known(kept[row].outputs[0]) for row, limit in enumerate(limits) if limit > 0
        }
        depth = 0
        while found:
            self._extend(trees, {row: outputs[-1] for row, outputs in found.items()}, depth)
            depth += 1
            rows = [row for row in found if depth < limits[row] and self._may_pay(trees[row])]
            tokens = {row: trees[row].tokens[1:] for row in rows}
            hidden = {row: found[row] for row in rows}
            if depth >= len(self.layers):  # the last layer goes on from its own output
                hidden = {row: outputs[-1:] for row, outputs in hidden.items()}
            index = min(depth, len(self.layers) - 1)
            outputs = self.layers[index].read(
                [kept[row].slots[index] for row in rows],
                [torch.cat(hidden[row]) for row in rows],
                [tokens[row][depth - len(hidden[row]) :] for row in rows],
                [ends[row] + depth for row in rows],
            )
            found = {}
            for row, out_TD in zip(rows, outputs, strict=True):
                at_root = kept[row].outputs[index] if depth < len(self.layers) else None
                found[row] = [*_known(at_root), *out_TD.split(1)]

    def _extend(self, trees: Sequence[DraftTree], outputs: dict[int, Tensor], depth: int) -> None:
        """Append the likeliest token after each of these rows' chains."""
        chances_B, tokens_B = self._likeliest(torch.cat(list(outputs.values())))
        chances = self.no_numbers.none_for(chances_B.tolist())
        drafted = zip(outputs, tokens_B.tolist(), chances, strict=True)
        for row, token, chance in drafted:
            key = (self.kind, min(depth, 4), round(4 * chance))
            trees[row].add(depth, token, chance, key)

    def _may_pay(self, tree: DraftTree) -> bool:
        """Whether a token behind the chain can still be likely enough."""
        chance = 1.0
        for one in tree.chances:
            chance *= one
        return chance >= self._min_chance


def _known(output_1D: Tensor | None) -> list[Tensor]:
    return [] if output_1D is None else [output_1D]


def _forward(
    model: Any,
    index: int,
    hidden_BND: Tensor,
    tokens_BN: Tensor,
    positions_BN: Tensor,
    mask: Tensor,
    cache: LayerCache,
) -> Tensor:
    """One layer of transformers' MtpModel, with a mask of our own."""
    embeds_BND = model.embed_tokens(tokens_BN)
    rotary = None
    if model.rotary_emb is not None:
        kinds = {"layer_type": model.config.layer_types[index]} if model.has_per_layer_rope else {}
        rotary = model.rotary_emb(embeds_BND, position_ids=positions_BN, **kinds)
    out_BND = model.layers[index](
        embeds_BND,
        hidden_BND,
        position_embeddings=rotary,
        attention_mask=mask,
        position_ids=positions_BN,
        past_key_values=cache,
    )
    return model.shared_post_norm(out_BND) if model.use_shared_post_norm else out_BND


def build(context: DraftContext, options: MtpOptions) -> MtpDrafter:
    """Raises IncompatibleBaseError where the base has no such layers."""
    layers, error = layers_or_error(context.base, context.memory)
    if error is not None:
        raise error.with_traceback(None)
    rows = [
        LayerRows(context.verifier, layer, partial(_forward, layers, index))
        for index, layer in enumerate(layers.layers)
    ]
    return MtpDrafter(context.base, rows, options.num_tokens)
