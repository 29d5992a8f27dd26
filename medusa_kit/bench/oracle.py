"""The oracle: plain transformers generate on a second, untouched copy of the base model.

Stock attention, stock linear layers, stock cache: nothing of ours takes part.

Shapes: T tokens, V vocabulary.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base_model import BaseModel, load_base_model


class Oracle:
    """A base model loaded once more, asked through transformers' own generate."""

    def __init__(self, base: BaseModel) -> None:
        self.base = base

    @classmethod
    def beside(cls, base: BaseModel) -> "Oracle":
        """A second copy of `base`, loaded from where it came from."""
        info = base.info
        return cls(
            load_base_model(info.name, dtype=info.dtype, device=info.device, revision=info.revision)
        )

    @torch.inference_mode()
    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any
    ) -> tuple[list[int], float]:
        """Greedy new tokens (the stop token included) and the seconds they took."""
        ids_1T = torch.tensor([list(prompt_ids)], device=self.base.device)
        room = self.base.info.context_length - len(prompt_ids)
        start = time.perf_counter()
        out_1T = self.base.model.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            max_new_tokens=min(max_new_tokens, room),
            do_sample=False,
            # Without these transformers warns that sampling settings are unused.
            temperature=None,
            top_k=None,
            top_p=None,
            eos_token_id=sorted(self.base.stop_token_ids) or None,
            pad_token_id=min(self.base.stop_token_ids, default=0),
            **options,
        )
        tokens = out_1T[0, len(prompt_ids) :].tolist()
        return tokens, time.perf_counter() - start

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """logits_V behind the last token, by one plain forward."""
        ids_1T = torch.tensor([list(ids)], device=self.base.device)
        return self.base.model(ids_1T, use_cache=False).logits[0, -1]
