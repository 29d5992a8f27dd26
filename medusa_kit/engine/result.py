"""What an answer comes back as: the text, and how it came about."""

from dataclasses import asdict, dataclass, field
from typing import Any

from medusa_kit.base.model import CHECKPOINT
from medusa_kit.infer.details import TokenScore
from medusa_kit.settings.engine import FLOAT32


@dataclass(frozen=True)
class GenerationStats:
    """Statistics of an answer. `acceptance_by_depth[d - 1]`: share of the steps that accepted d
    nodes or more."""

    drafter: str
    attention: str  # backends of tree attention in its steps, such as `flash` or `flash+sdpa`
    attention_fallbacks: list[str]  # where another backend than asked for was used, and why
    prompt_tokens: int
    new_tokens: int
    num_steps: int
    acceptance_length: float  # (new tokens - 1) / verify forwards; plain decoding is exactly 1
    acceptance_by_depth: list[float]
    seconds: float
    tokens_per_second: float
    acceptance: str = "exact"  # exact | typical
    steps_run_by: str = "torch"  # torch, C++ or fixed shapes, with details
    drafter_notes: list[str] = field(default_factory=list)  # what drafted when, and why
    first_token_seconds: float = 0.0  # until the first token, contained in `seconds`
    dtype: str = "float32"  # of the base model
    weights: str = CHECKPOINT  # checkpoint | int8
    activations: str = FLOAT32  # float32 | int16 | int8: what quantised weights are multiplied by
    cache: str = "float32"  # in which keys and values are stored; float16 is lossy
    quantization: str | None = None  # of the base as loaded; the answer is the quantised model's
    # How far rounding may move a logit: with a top-2 margin below it the token may differ.
    rounding_tolerance: float = 0.0
    nodes_per_step: float = 1.0  # verified for this answer, the root included
    cached_tokens: int = 0  # of the prompt's, which an earlier request had read
    check_remembered: bool = False  # whether the self-check was that of an earlier load
    # Tokens with such a margin, after a prompt part of which was not read anew. None: not counted,
    # since tokens were drawn, or chosen from processed logits.
    near_ties: int | None = 0
    # Nodes computed in vain, since another row of the batch had a larger tree: some steps pad.
    padding_nodes: int = 0

    @property
    def decoding_tokens_per_second(self) -> float | None:
        """After the first token, so without the reading of the prompt; None for one token."""
        seconds = self.seconds - self.first_token_seconds
        return (self.new_tokens - 1) / seconds if self.new_tokens > 1 and seconds > 0 else None

    @property
    def lossy(self) -> bool:
        """Whether the answer may differ from that of the base model's plain decoding, in the same
        precision of `activations`."""
        return bool(self.lossy_by)

    @property
    def lossy_by(self) -> list[str]:
        """What may have changed the answer."""
        acceptance = [f"{self.acceptance} acceptance"] if self.acceptance != "exact" else []
        weights = [f"{self.weights} weights"] if self.weights != CHECKPOINT else []
        return acceptance + weights + ([f"{self.cache} cache"] if self.cache != "float32" else [])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lossy": self.lossy}


@dataclass(frozen=True)
class GenerationResult:
    """`token_ids`: the new tokens only, the stop token included. `text`: without it. `logprobs`: a
    score of each token, where they were asked for."""

    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length
    stats: GenerationStats
    logprobs: list[TokenScore] | None = None
