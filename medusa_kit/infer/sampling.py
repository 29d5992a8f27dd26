"""How the next token is chosen: greedy, or drawn exactly, from the base model's processed logits.

Processing is transformers' own (the base's generation config: penalties and the like, then
temperature, top-k, top-p), applied to a node's logits with that node's own prefix.

A draw uses Gumbel noise that depends on the seed and the token's absolute position alone:
argmax(log p + noise) is a sample of p, and the text is the same for every drafter, tree and batch.

Shapes: N nodes with root, V vocabulary, T tokens.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_kit.errors import ConfigError

MASK_64 = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy. Raises ConfigError when a value is out of range."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature {self.temperature} is out of range; expected 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k {self.top_k} is out of range; expected 1 or more")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p {self.top_p} is out of range; expected above 0, at most 1")
        if self.temperature == 0.0 and (self.top_k is not None or self.top_p is not None):
            raise ConfigError(
                "top_k and top_p have no meaning when decoding greedily",
                hint="give a temperature above 0",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class TokenChooser:
    """Names the token behind a node of one row."""

    def __init__(self, model: Any, params: SamplingParams, prompt_length: int) -> None:
        self.params = params
        self._processors = _processors(model, params, prompt_length)

    @property
    def takes_argmax(self) -> bool:
        """Whether the plain argmax of the model's logits is the answer, so all nodes go at once."""
        return self.params.greedy and not self._processors

    def choose(self, logits_V: Tensor, prefix: Sequence[int]) -> int:
        """The token behind `prefix`, whose last token gave `logits_V`."""
        return int(self.scores(logits_V, prefix).argmax(-1))

    def scores(self, logits_V: Tensor, prefix: Sequence[int]) -> Tensor:
        """scores_V whose argmax is the token: processed logits, and noise when sampling."""
        scores_1V = logits_V[None].float()
        if self._processors:
            prefix_1T = torch.tensor([list(prefix)], device=logits_V.device)
            scores_1V = self._processors(prefix_1T, scores_1V)
        if not self.params.greedy:
            noise_V = gumbel_noise(self.params.seed, len(prefix), scores_1V.shape[-1])
            scores_1V = scores_1V + noise_V.to(scores_1V.device)
        return scores_1V[0]


def gumbel_noise(seed: int, position: int, size: int) -> Tensor:
    """Standard Gumbel noise [size] for the token at `position`, the same on every machine."""
    generator = torch.Generator().manual_seed(_mix(seed, position))
    return -torch.empty(size).exponential_(generator=generator).log()


def _mix(seed: int, position: int) -> int:
    """A seed for each pair, well apart for neighbours (the finaliser of SplitMix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def _processors(model: Any, params: SamplingParams, prompt_length: int) -> Any:
    """transformers' processors for these parameters over the base's generation config."""
    config = copy.deepcopy(model.generation_config)
    config.do_sample = not params.greedy
    config.temperature = None if params.greedy else params.temperature
    config.top_k = 0 if params.top_k is None else params.top_k
    config.top_p = 1.0 if params.top_p is None else params.top_p
    # generate() fills these before it builds processors; without them lengths cannot be penalised
    config.max_length = int(model.config.get_text_config().max_position_embeddings)
    ids = config.eos_token_id
    eos = [ids] if isinstance(ids, int) else ids
    device = model.get_output_embeddings().weight.device
    config._eos_token_tensor = None if eos is None else torch.tensor(eos, device=device)
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt_length,
        encoder_input_ids=None,
        device=device,
        model_kwargs={},
    )
