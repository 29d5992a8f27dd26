"""The verifier: the base model, run over the nodes of a tree after a cached prefix.

Shapes: B batch, T tokens, N nodes with root, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.families import refuse_impossible
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention import install_tree_attention
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.cpu.decoder import NativeDecoder
from medusa_kit.infer.transfer import to_device
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.tree_step import NodeScores, TreeStep
from medusa_kit.locks import lock_of

Forward = Callable[..., tuple[Tensor, Tensor]]  # (hidden_BND, logits_BNV)
PREFILL_CHUNK = 512  # tokens of a prompt in one forward: bounds the mask and the activations


class Verifier:
    """Runs trees on a base model. Logits come from the model's own forward.

    `attention`: the backend of tree attention, auto, sdpa, flash or triton. Raises ConfigError for
    one that is not there, IncompatibleBaseError for a model that trees are known to be impossible
    on.
    """

    def __init__(self, base: BaseModel, attention: str = "auto") -> None:
        refuse_impossible(base.model.config, base.info.name)
        self.base = base
        self.attention = AttentionChoice(attention)
        self._holder = install_tree_attention(base.model)
        self.native: NativeDecoder | None = None  # runs steps in one call, where the model allows
        self.steps_run_by = "torch"

    def new_cache(self, batch_size: int, num_slots: int) -> TreeCache:
        return TreeCache(self.base.info.num_layers, batch_size, num_slots)

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
        keep: Tensor | int = 0,
    ) -> NodeScores:
        """Score every node. The nodes lie in the cache, not committed.

        `prompt`: the nodes are a piece of each row's prompt, where many rows meet.
        `keep`: which nodes need hidden states and logits (indices, or 0 for all).
        Nodes past the context's last position get that position; they can never be accepted.
        """
        cache.check_room(tokens_BN.shape[1])
        lengths_B = cache.device_lengths(depths_BN.device)
        last_position = self.base.info.context_length - 1
        positions_BN = (lengths_B[:, None] + depths_BN).clamp_max(last_position)
        lengths, attend = tuple(cache.lengths), self.attention.attend
        step = TreeStep(lengths, depths_BN, sees_BNN, causal_prompt, attend, lengths_B=lengths_B)
        if self.native and self.native.takes(cache, step):
            wanted = None if isinstance(keep, int) else keep
            with lock_of(self.base.model):
                return self.native.forward(cache, tokens_BN, positions_BN, step, wanted, prompt)
        return NodeScores(
            *self.run_model(
                self.base.hidden_and_logits,
                step,
                tokens_BN,
                position_ids=positions_BN,
                past_key_values=cache,
                **({} if isinstance(keep, int) else {"logits_to_keep": keep}),
            )
        )

    def run_model(
        self, forward: Forward, step: TreeStep, tokens_BN: Tensor, **arguments: Any
    ) -> tuple[Tensor, Tensor]:
        """`forward` of the model while `step` hangs on its attention modules. One thread at a time
        runs a model: what modules keep between calls is theirs."""
        with lock_of(self.base.model):
            self._holder.step = step
            try:
                return forward(
                    tokens_BN,
                    attention_mask=self._holder.attention_mask(self.base.dtype),
                    use_cache=True,
                    **arguments,
                )
            finally:
                self._holder.step = None

    @torch.inference_mode()
    def prefill(self, cache: TreeCache, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Commit the prompts; (hidden_BD, logits_BV) at each row's last prompt token."""
        device = self.base.device
        hidden: list[Tensor | None] = [None] * len(prompts)
        logits: list[Tensor | None] = [None] * len(prompts)
        longest = max(len(prompt) for prompt in prompts)
        size = (self.native and self.native.prompt_chunk(len(prompts))) or PREFILL_CHUNK
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
                keep=to_device(wanted, device),
            )
            cache.commit([range(len(chunk)) for chunk in chunks])
            for row, end in ends.items():
                hidden[row] = scores.hidden_BMD[row, wanted.index(end)]
                logits[row] = scores.logits_BMV[row, wanted.index(end)]
        assert all(h is not None for h in hidden)
        return torch.stack(hidden), torch.stack(logits)  # type: ignore[arg-type]
