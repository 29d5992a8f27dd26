"""The oracle: plain transformers generate on a second, untouched copy of the base model.

It uses stock attention, linear layers and cache, and none of our code.

Shapes: B batch, T tokens, V vocabulary.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.cpu.packed.int8_weights import with_weights


class Oracle:
    """A base model loaded a second time, which answers by transformers' own generate."""

    def __init__(self, base: BaseModel) -> None:
        self.base = base

    @classmethod
    def beside(cls, base: BaseModel, same_weights: bool = False) -> "Oracle":
        """A second copy of `base`, loaded from the same place.

        It has the checkpoint's weights; with `same_weights` those of `base`, also if rounded.
        """
        info = base.info
        copy = load_base_model(
            info.name, dtype=info.dtype, device=info.device, revision=info.revision
        )
        return cls(with_weights(copy, info.weights) if same_weights else copy)

    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any
    ) -> tuple[list[int], float]:
        """Greedy new tokens (the stop token included) and the seconds they took."""
        (tokens,), seconds = self.generate_batch([prompt_ids], max_new_tokens, **options)
        return tokens, seconds

    @torch.inference_mode()
    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        **options: Any,
    ) -> tuple[list[list[int]], float]:
        """New tokens of each prompt, and the seconds for all; shorter prompts are padded left.

        A `temperature` above 0 samples from the plain softmax, with torch's generator at `seed`.
        """
        ids_BT, mask_BT = self._padded(prompts)
        room = self.base.info.context_length - ids_BT.shape[1]
        device = self.base.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            start = time.perf_counter()
            out_BT = self.base.own_model.generate(
                ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=min(max_new_tokens, room),
                eos_token_id=sorted(self.base.stop_token_ids) or None,
                pad_token_id=self._pad_id,
                **_sampling(temperature),
                **options,
            )
            rows = out_BT[:, ids_BT.shape[1] :].tolist()
            seconds = time.perf_counter() - start
        return [self._answer(row) for row in rows], seconds

    @property
    def _pad_id(self) -> int:
        return min(self.base.stop_token_ids, default=0)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(len(prompt) for prompt in prompts)
        gaps = [longest - len(prompt) for prompt in prompts]
        rows = [[self._pad_id] * gap + list(p) for gap, p in zip(gaps, prompts, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        device = self.base.device
        return torch.tensor(rows, device=device), torch.tensor(mask, device=device)

    def _answer(self, row: list[int]) -> list[int]:
        """The row up to its first stop token, after which there is padding."""
        stops = (i for i, token in enumerate(row) if token in self.base.stop_token_ids)
        return row[: next(stops, len(row)) + 1]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """logits_V after the last token, by one plain forward."""
        ids_1T = torch.tensor([list(ids)], device=self.base.device)
        return self.base.own_model(ids_1T, use_cache=False).logits[0, -1]


def _sampling(temperature: float) -> dict[str, Any]:
    if temperature == 0:
        # The Nones keep transformers from warning that sampling settings are unused.
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    # Every token may be drawn, as in our sampling; top-k would default to 50.
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
