"""What a family does to its logits after the output embedding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitScale:
    """Logits after the output embedding are multiplied by a factor, then softly capped."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitScale":
        factor = getattr(config, "logit_scale", None)  # Cohere
        divisor = getattr(config, "logits_scaling", None)  # Granite
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2, Gemma 3
        return cls(1.0 if factor is None else factor, 1.0 if divisor is None else divisor, cap)

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits if self.factor == 1 else logits * self.factor
        scaled = scaled if self.divisor == 1 else scaled / self.divisor
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap
