"""The verifier: the base model, run over the nodes of a tree after a cached prefix.

Shapes: B batch, T tokens, N nodes with root, M of them kept, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from medusa_kit.base.families import cache_argument, refuse_impossible
from medusa_kit.base.model import BaseModel
from medusa_kit.base.tokenizer.ids import check_token_ids
from medusa_kit.errors import Live
from medusa_kit.infer.attention import ATTENTION_NAME, install_tree_attention
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.attention.sdpa import without_cudnn
from medusa_kit.infer.attention.step import StepHolder, TreeStep
from medusa_kit.infer.attention.watched_layers import watching
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.mkl_linear import forget_packs, using_packs
from medusa_kit.infer.outputs import NodeScores, Outputs, TextStates
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.locks import lock_of
from medusa_kit.no_gradients import no_gradients
from medusa_kit.store.records import Record
from medusa_kit.transfer import to_device

Forward = Callable[..., tuple[Tensor, Tensor]]  # (hidden_BND, logits_BNV)
PREFILL_CHUNK = 512  # tokens of a prompt in one forward: bounds the mask and the activations


class Verifier(Live):
    """Runs trees on a base model. Logits come from the model's own forward; subclasses compute the
    same forward in other ways.

    `attention`: the backend of tree attention (auto, sdpa, flash, triton), or a choice already
    made. `steps_run_by`: for statistics. `watched`: layers of the base whose outputs are given
    beside the hidden states, for drafters that read them. `chains_only`: whether a row's nodes must
    follow one another.
    Raises ConfigError for a backend that is not installed, IncompatibleBaseError for a model on
    which drafting is known to be impossible.
    """

    chains_only = False
    captures = False  # whether forwards over a cache are captured, which takes a while

    def __init__(
        self,
        base: BaseModel,
        attention: AttentionChoice | str = "auto",
        steps_run_by: str = "torch",
    ) -> None:
        refuse_impossible(base.config, base.info.name)
        self.base = base
        self.attention = AttentionChoice(attention) if isinstance(attention, str) else attention
        self.steps_run_by = steps_run_by
        self.cache_dtype: torch.dtype | None = None  # None: as keys and values are computed
        self.rounding_tolerance = 0.0  # of forwards that were compiled, beyond the self-check's
        self.watched: tuple[int, ...] = ()
        self._watching: dict[tuple[int, ...], Self] = {}
        self._most_rows = base.info.vocab_size  # that the model has had
        self.number = base.number  # of the changes of the model that what is kept here includes
        if not base.is_light:
            _ = self._holder

    def with_watched(self, layers: tuple[int, ...]) -> Self:
        """A verifier over the same base that also watches these layers, itself for none. Caches are
        not shared with it."""
        if layers in ((), self.watched):
            return self
        if layers not in self._watching:
            self._watching.setdefault(layers, self._watcher(layers))  # unless another thread has
        return self._watching[layers]

    def _watcher(self, layers: tuple[int, ...]) -> Self:
        """A copy that watches these layers, complete before any other thread sees it."""
        verifier = self.copied()
        verifier.watched = layers
        return verifier

    def copied(self) -> Self:
        """A copy to be changed."""
        verifier = self._twin()
        verifier._watching = {}
        return verifier

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""
        return self.base.info.num_layers

    @cached_property
    def _holder(self) -> StepHolder:
        """The holder of the step that a forward of the model runs."""
        return install_tree_attention(self.base.own_model)

    def keep_attention(self) -> None:
        """Switch the model to tree attention again if somebody has switched it to another."""
        if "_holder" in vars(self):
            config = self.base.own_model.config
            if config._attn_implementation not in (ATTENTION_NAME, self._holder.mask_form):
                vars(self).pop("_holder")
                _ = self._holder

    @cached_property
    def _cache_argument(self) -> str:
        return cache_argument(self.base.own_model)

    @property
    def reads_packed_weights(self) -> bool:
        """Whether steps read copies of the weights that were packed."""
        return False

    @property
    def plain(self) -> "Verifier":
        """The verifier of the model without an adapter."""
        return self

    def renew(self) -> None:
        """Make anew, or drop, what was made of the model, since that has changed."""
        vars(self).pop("_cache_argument", None)
        vars(self).pop("_holder", None)  # modules that are new have none
        forget_packs(self.base.own_model)
        _ = self._holder

    def run_by_torch(self, reason: str) -> None:
        """Read no copies of the weights any more."""
        raise NotImplementedError

    def check_record(self) -> Record | None:
        """The record of the self-check; None where it is not kept."""
        return self.base.check_record(
            check="trees",
            by=self.steps_run_by,
            attention=[self.attention.requested, *self.attention.ruled_out],
            pads=self.pads,
            layers=sorted({type(module).__name__ for module in self.base.own_modules()}),
        )

    @property
    def own_attention(self) -> str | None:
        """The attention of a model class that does not use transformers' attention interface."""
        return self._holder.mask_form

    @property
    def pads(self) -> bool:
        """Whether rows with fewer nodes are padded in the whole model, not in attention only."""
        return self._holder.pads or self.own_attention is not None

    def pad(self, whether: bool) -> None:
        """Set whether rows are padded in this model from now on, unless its class needs it."""
        self._holder.pads = whether

    def lock(self) -> AbstractContextManager[Any]:
        """The lock that the thread which runs the model has."""
        return lock_of(self.base)

    def windowed(self) -> list[Any]:
        """The objects whose attribute `sliding_window`, if they have one, steps go by."""
        return window_owners(self.base.own_model)

    def new_cache(self, batch_size: int, num_positions: int) -> TreeCache:
        return TreeCache(self.num_layers, batch_size, num_positions, self.cache_dtype)

    def fitted(self, draft: Forest) -> Forest:
        """As much of a draft as can be verified. What drafters keep of a model's tokens may be of a
        time when it had more rows: a token without one is replaced, which changes no answer."""
        num_rows = self.base.info.vocab_size
        self._most_rows = max(self._most_rows, num_rows)
        if num_rows == self._most_rows:
            return draft
        return replace(draft, tokens_N=draft.tokens_N.clamp(max=num_rows - 1))

    def prompt_chunk(self, num_rows: int) -> int:
        """How many tokens of each of `num_rows` prompts one forward reads."""
        return PREFILL_CHUNK

    def positions_of_tree(self, num_nodes: int) -> int:
        """How many slots behind a row's text a tree of so many nodes needs."""
        return num_nodes

    def positions_for(self, num_rows: int) -> int:
        """How many slots each row of a batch for any number of requests has at first."""
        return 0

    def prepare(self, cache: TreeCache, num_rows: int) -> None:
        """Do what would hold up the first requests of a batch, whose cache is empty yet."""

    def make_room(self) -> bool:
        """Free memory that can be had again; returns whether there was any."""
        return False

    def _step(
        self, cache: TreeCache, depths_BN: Tensor, sees_BNN: Tensor, causal_prompt: bool
    ) -> TreeStep:
        lengths_B, attend = cache.device_lengths(depths_BN.device), self.attention.attend
        lengths = tuple(cache.lengths_in_use)
        return TreeStep(lengths, depths_BN, sees_BNN, causal_prompt, attend, lengths_B=lengths_B)

    def _positions(self, step: TreeStep) -> Tensor:
        """positions_BN. Nodes past the context's last position, which are never accepted, get that
        position."""
        return step.unpadded(step.positions().clamp_max(self.base.info.context_length - 1))

    def _run_model(
        self,
        forward: Forward,
        cache: TreeCache,
        step: TreeStep,
        tokens_BN: Tensor,
        keep_M: Tensor | None = None,
        whole: list[TextStates] | None = None,
    ) -> Outputs:
        """`forward` of the model while `step` is attached to its attention modules. One thread at
        a time runs a model: what modules keep between calls is theirs. `whole`: gets the states
        of all nodes, whichever are asked for."""
        positions_BN = self._positions(step)
        of_all = bool(self.watched) or whole is not None
        name = "keep_M" if of_all else "logits_to_keep"
        kept: dict[str, Any] = {} if keep_M is None else {name: keep_M}
        with (
            self.lock(),
            without_cudnn(self.base.device),
            using_packs(),
            watching(self.base, self.watched) as outputs,
        ):
            self._holder.step = step
            try:
                hidden_BND, logits_BMV = forward(
                    tokens_BN,
                    attention_mask=self._holder.attention_mask(self.base.dtype),
                    position_ids=positions_BN,
                    use_cache=True,
                    **{self._cache_argument: cache, **kept},
                )
            finally:
                self._holder.step = None
        layers_BNX = None
        if outputs:
            layers = [outputs[layer].to(hidden_BND.device) for layer in self.watched]
            layers_BNX = torch.cat(layers, dim=-1)
        if whole is not None:
            whole.append(TextStates(hidden_BND, layers_BNX))
        if of_all and keep_M is not None:
            hidden_BND = hidden_BND[:, keep_M]
            layers_BNX = None if layers_BNX is None else layers_BNX[:, keep_M]
        return Outputs(hidden_BND, logits_BMV, layers_BNX)

    @no_gradients
    def score(self, cache: TreeCache, nodes: Forest, rows: Sequence[int]) -> NodeScores:
        """Score trees after these rows of the cache, which may have different numbers of nodes.
        The nodes are in the cache, not committed."""
        return self._score(cache, nodes, rows)

    @no_gradients
    def read_prompts(
        self,
        cache: TreeCache,
        rows: Sequence[int],
        pieces: Sequence[Sequence[int]],
        seen: dict[int, TextStates] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Commit a piece of each row's prompt; (hidden_BD, logits_BV) at the last token of each.
        `seen`: gets the states at all tokens of each row's piece, as far as what runs the step
        gives them. Longer pieces than `prompt_chunk` take several forwards. Raises ConfigError for
        an id without a row: a model that has changed may have fewer."""
        for piece in pieces:
            check_token_ids(piece, self.base.info.vocab_size)
        size = self.prompt_chunk(len(rows))
        if max(map(len, pieces)) <= size:
            return self._read_pieces(cache, rows, pieces, seen)
        ends = list[tuple[Tensor, Tensor]]()
        for row, piece in zip(rows, pieces, strict=True):
            parts = list[TextStates]()
            for start in range(0, len(piece), size):
                read: dict[int, TextStates] | None = None if seen is None else {}
                end = self._read_pieces(cache, [row], [piece[start : start + size]], read)
                parts += (read or {}).values()
            if seen is not None and parts:
                seen[row] = TextStates.joined(parts)
            ends.append(end)
        hidden, logits = zip(*ends, strict=True)
        return torch.cat(hidden), torch.cat(logits)

    def _read_pieces(
        self,
        cache: TreeCache,
        rows: Sequence[int],
        pieces: Sequence[Sequence[int]],
        seen: dict[int, TextStates] | None,
    ) -> tuple[Tensor, Tensor]:
        order, ends = list[int](), list[NodeScores]()
        whole: list[TextStates] | None = None if seen is None else []
        for indices in _of_one_size([cache.lengths[row] for row in rows], pieces):
            some_rows = [rows[index] for index in indices]
            nodes = Forest.chains([pieces[index] for index in indices], self.base.device)
            ends.append(self._score(cache, nodes, some_rows, prompt=True, whole=whole))
            if seen is not None and whole is not None:
                seen.update(zip(some_rows, whole.pop().split(nodes.counts), strict=True))
            order += indices
        # At the end, so that a call that ran out of memory may be made again.
        cache.commit([range(len(piece)) for piece in pieces], rows)
        hidden_BD = torch.cat([scores.hidden_ND for scores in ends])
        logits_BV = torch.cat([scores.logits_NV for scores in ends])
        if order == sorted(order):
            return hidden_BD, logits_BV
        back_B = to_device(sorted(range(len(order)), key=order.__getitem__), self.base.device)
        return hidden_BD[back_B], logits_BV[back_B]

    def num_padding(self, counts: Sequence[int]) -> list[int]:
        """How many nodes each row is padded with, where rows have so many."""
        most = max(counts)
        if min(counts) == most or not self.pads:
            return [0] * len(counts)
        return [most - count for count in counts]

    def _score(
        self,
        cache: TreeCache,
        nodes: Forest,
        rows: Sequence[int],
        prompt: bool = False,
        whole: list[TextStates] | None = None,
    ) -> NodeScores:
        """Scores of all nodes, or at the last of each row of a prompt. Rows with different numbers
        of nodes go through the model as one row, so that attention alone is padded, unless the
        model needs them padded. `whole`: as in `_run_model`."""
        fresh = prompt and not any(cache.lengths[row] for row in rows)
        even = min(nodes.counts) == max(nodes.counts)
        joined = not even and not self.pads
        tokens, depths_BN, sees_BNN = nodes.padded()
        keep_M = None
        if joined:
            tokens = nodes.tokens_N[None]
        if prompt and (even or joined):
            ends = accumulate(nodes.counts[:1] if even else nodes.counts)
            keep_M = to_device([end - 1 for end in ends], self.base.device)
        with cache.using(rows, nodes.counts if joined else None):
            cache.check_room(max(nodes.counts))
            step = self._step(cache, depths_BN, sees_BNN, fresh)
            step.at_N = nodes.in_padded() if joined else None
            forward = self.base.hidden_and_logits
            outputs = self._run_model(forward, cache, step, tokens, keep_M, whole)
        outputs = outputs.each(lambda part: part.flatten(0, 1))
        if not (even or joined):
            nodes_M = nodes.in_padded(last_only=prompt)
            outputs = outputs.each(lambda part: part[nodes_M])
        return NodeScores.of(outputs)


def window_owners(model: Any) -> list[Any]:
    """Modules of a transformers model and their configs."""
    modules = list(model.modules())
    return [*modules, *(getattr(module, "config", None) for module in modules),
            model.config.get_text_config()]  # fmt: skip


def _of_one_size(lengths: Sequence[int], pieces: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of the pieces that are read together: attention pads a piece to at most twice its
    length, and the first of a prompt needs no mask."""
    sizes: dict[tuple[bool, int], list[int]] = {}
    for index, (length, piece) in enumerate(zip(lengths, pieces, strict=True)):
        sizes.setdefault((length > 0, (len(piece) - 1).bit_length()), []).append(index)
    return list(sizes.values())
