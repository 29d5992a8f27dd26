"""The verifier: the base model, run over the nodes of a tree after a cached prefix.

Shapes: B batch, T tokens, N nodes with root, M of them kept, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.families import refuse_impossible
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention import install_tree_attention
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.transfer import to_device
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.tree_step import Nodes, NodeScores, RaggedScores, TreeStep
from medusa_kit.locks import lock_of

Forward = Callable[..., tuple[Tensor, Tensor]]  # (hidden_BND, logits_BNV)
PREFILL_CHUNK = 512  # tokens of a prompt in one forward: bounds the mask and the activations


class Verifier:
    """Runs trees on a base model. Logits come from the model's own forward; subclasses compute the
    same forward in other ways.

    `attention`: the backend of tree attention (auto, sdpa, flash, triton), or a choice already
    made. `steps_run_by`: for statistics.
    Raises ConfigError for a backend that is not installed, IncompatibleBaseError for a model on
    which trees are known to be impossible.
    """

    def __init__(
        self,
        base: BaseModel,
        attention: AttentionChoice | str = "auto",
        steps_run_by: str = "torch",
    ) -> None:
        refuse_impossible(base.model.config, base.info.name)
        self.base = base
        self.attention = AttentionChoice(attention) if isinstance(attention, str) else attention
        self.steps_run_by = steps_run_by
        self._holder = install_tree_attention(base.model)

    @property
    def reads_packed_weights(self) -> bool:
        """Whether steps read weights as they were at load, whatever becomes of the model."""
        return False

    @property
    def own_attention(self) -> str | None:
        """The attention of a model class that does not use transformers' attention interface."""
        return self._holder.mask_form

    def new_cache(self, batch_size: int, num_slots: int) -> TreeCache:
        return TreeCache(self.base.info.num_layers, batch_size, num_slots)

    def prompt_chunk(self, num_rows: int) -> int:
        """Tokens of each of so many prompts that one forward reads."""
        return PREFILL_CHUNK

    @torch.inference_mode()
    def forward(
        self,
        cache: TreeCache,
        tokens_BN: Tensor,
        depths_BN: Tensor,
        sees_BNN: Tensor,
        *,
        causal_prompt: bool = False,
        prompt: bool = False,
        keep_M: Tensor | None = None,
    ) -> NodeScores:
        """Score every node. The nodes are written to the cache, but not committed.

        `prompt`: the nodes are a piece of each row's prompt, so there are many.
        `keep_M`: the nodes whose hidden states and logits are needed, all unless given.
        """
        cache.check_room(tokens_BN.shape[1])
        step = self._step(cache, depths_BN, sees_BNN, causal_prompt)
        return self._scores(cache, step, tokens_BN, keep_M, prompt)

    def _step(
        self, cache: TreeCache, depths_BN: Tensor, sees_BNN: Tensor, causal_prompt: bool
    ) -> TreeStep:
        lengths_B, attend = cache.device_lengths(depths_BN.device), self.attention.attend
        lengths = tuple(cache.lengths_in_use)
        return TreeStep(lengths, depths_BN, sees_BNN, causal_prompt, attend, lengths_B=lengths_B)

    def _scores(
        self,
        cache: TreeCache,
        step: TreeStep,
        tokens_BN: Tensor,
        keep_M: Tensor | None,
        prompt: bool,
    ) -> NodeScores:
        forward = self.base.hidden_and_logits
        return NodeScores(*self._run_model(forward, cache, step, tokens_BN, keep_M))

    def _positions(self, step: TreeStep) -> Tensor:
        """positions_BN. Nodes past the context's last position, which are never accepted, get that
        position."""
        positions_BN = step.device_lengths()[:, None] + step.depths_BN
        return positions_BN.clamp_max(self.base.info.context_length - 1)

    def _run_model(
        self,
        forward: Forward,
        cache: TreeCache,
        step: TreeStep,
        tokens_BN: Tensor,
        keep_M: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward` of the model while `step` is attached to its attention modules. One thread at
        a time runs a model: what modules keep between calls is theirs."""
        positions_BN = self._positions(step)
        kept: dict[str, Any] = {} if keep_M is None else {"logits_to_keep": keep_M}
        with lock_of(self.base.model):
            self._holder.step = step
            try:
                return forward(
                    tokens_BN,
                    attention_mask=self._holder.attention_mask(self.base.dtype),
                    position_ids=positions_BN,
                    past_key_values=cache,
                    use_cache=True,
                    **kept,
                )
            finally:
                self._holder.step = None

    @torch.inference_mode()
    def score_trees(self, cache: TreeCache, nodes: Nodes, rows: Sequence[int]) -> RaggedScores:
        """Score trees after these rows of the cache, which may have different numbers of nodes.
        Torch pads them to the largest. The nodes are in the cache, not committed."""
        with cache.using(rows):
            scores = self.forward(cache, *nodes.padded())
        flat = [part.flatten(0, 1) for part in (scores.hidden_BMD, scores.logits_BMV)]
        if min(nodes.counts) == max(nodes.counts):
            return RaggedScores(*flat)
        at = nodes.in_padded()
        return RaggedScores(*(part[at] for part in flat))

    @torch.inference_mode()
    def read_prompts(
        self, cache: TreeCache, rows: Sequence[int], pieces: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Commit a piece of each row's prompt; (hidden_BD, logits_BV) at the last token of each.
        One row after another: a row is never padded to another's length."""
        ends = []
        for row, piece in zip(rows, pieces, strict=True):
            last_1 = to_device([len(piece) - 1], self.base.device)
            chain = Nodes.chains([piece], self.base.device).padded()
            first = cache.lengths[row] == 0
            with cache.using([row]):
                ends.append(
                    self.forward(cache, *chain, causal_prompt=first, prompt=True, keep_M=last_1)
                )
        # At the end, so that a call that ran out of memory may be made again.
        cache.commit([range(len(piece)) for piece in pieces], rows)
        return (
            torch.cat([scores.hidden_BMD[:, 0] for scores in ends]),
            torch.cat([scores.logits_BMV[:, 0] for scores in ends]),
        )

    @torch.inference_mode()
    def prefill(self, cache: TreeCache, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Commit the prompts; (hidden_BD, logits_BV) at each row's last prompt token."""
        device = self.base.device
        hidden: list[Tensor | None] = [None] * len(prompts)
        logits: list[Tensor | None] = [None] * len(prompts)
        longest = max(len(prompt) for prompt in prompts)
        size = self.prompt_chunk(len(prompts))
        for start in range(0, longest, size):
            chunks = [list(prompt[start : start + size]) for prompt in prompts]
            T = max(len(chunk) for chunk in chunks)
            tokens_BT = to_device([c + [0] * (T - len(c)) for c in chunks], device)
            depths_BT = torch.arange(T, device=device).expand(len(prompts), T)
            sees_TT = torch.ones(T, T, dtype=torch.bool, device=device).tril()
            ends = {row: len(chunk) - 1 for row, chunk in enumerate(chunks)
                    if chunk and start + len(chunk) == len(prompts[row])}  # fmt: skip
            wanted = sorted(set(ends.values()) or {0})
            scores = self.forward(
                cache,
                tokens_BT,
                depths_BT,
                sees_TT.expand(len(prompts), T, T),
                causal_prompt=start == 0,
                prompt=True,
                keep_M=to_device(wanted, device),
            )
            cache.commit([range(len(chunk)) for chunk in chunks])
            for row, end in ends.items():
                hidden[row] = scores.hidden_BMD[row, wanted.index(end)]
                logits[row] = scores.logits_BMV[row, wanted.index(end)]
        assert all(h is not None for h in hidden)
        return torch.stack(hidden), torch.stack(logits)  # type: ignore[arg-type]
