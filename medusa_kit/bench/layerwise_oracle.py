"""The oracle for a model that is too large for a second copy in memory: transformers' own forward,
layer by layer (base/layerwise.py).

It does not generate. It reads prompt and answer in one forward, many of them together, and says
which token it would have chosen at each position. An answer is the oracle's own if it has these
tokens and ends where the oracle's would.

Shapes: N positions of an answer, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base.layerwise import LayerwiseModel, layerwise_model
from medusa_kit.base.model import INT8, BaseModel
from medusa_kit.bench.oracle import Oracle
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.cpu.packed.int8_weights import rounded
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.mkl_linear import free_memory
from medusa_kit.settings.sampling import SamplingParams

SHARE_OF_MEMORY = 0.5  # of the free memory: a model takes more while it is loaded


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt and the answer to be compared with the oracle."""

    prompt_ids: Sequence[int]
    answer: Sequence[int]


@dataclass(frozen=True)
class Choice:
    """The oracle's token at one position of an answer, None where it has ended. `margin`: how far
    the answer's own token is below it; infinite where either has ended."""

    position: int
    expected: int | None
    actual: int | None
    margin: float


class LayerwiseOracle:
    """A base model whose weights are read from its checkpoint as they are needed."""

    def __init__(
        self, model: LayerwiseModel, stop_token_ids: frozenset[int], context_length: int
    ) -> None:
        self.pieces = model
        self.stop_token_ids, self.context_length = stop_token_ids, context_length

    @classmethod
    def beside(cls, base: BaseModel, same_weights: bool = False) -> "LayerwiseOracle":
        """An oracle of the checkpoint of `base`; with `same_weights` rounded as `base` is.

        Raises CheckpointError, and IncompatibleBaseError where that is not possible.
        """
        info = base.info
        if (obstacle := _obstacle(base)) is not None:
            raise IncompatibleBaseError(
                f"{info.name!r} cannot be verified layer by layer: {obstacle}",
                hint="leave out --layer-by-layer",
            )
        change = rounded if same_weights and info.weights == INT8 else None
        model = layerwise_model(info.name, info.revision, change)
        return cls(model, base.stop_token_ids, info.context_length)

    def misses(
        self, answered: Sequence[AnsweredPrompt], max_new_tokens: int, sampling: SamplingParams
    ) -> list[list[Choice]]:
        """The positions where each answer is not the oracle's own; none after one has ended."""
        choices: list[list[Choice]] = [[] for _ in answered]
        texts = [[*prompt.prompt_ids, *prompt.answer] for prompt in answered]
        starts = [len(prompt.prompt_ids) - 1 for prompt in answered]
        with console.progress("verifying layer by layer", len(answered), "answers") as bar:
            for index, logits_NV in self.pieces.logits(texts, starts):
                choices[index] = self._misses(answered[index], logits_NV, max_new_tokens, sampling)
                bar.advance()
        return choices

    @torch.inference_mode()
    def _misses(
        self,
        answered: AnsweredPrompt,
        logits_NV: Tensor,
        max_new_tokens: int,
        sampling: SamplingParams,
    ) -> list[Choice]:
        choices = list[Choice]()
        room = min(max_new_tokens, self.context_length - len(answered.prompt_ids))
        sampler = Sampler(self.pieces, sampling, answered.prompt_ids, max_new_tokens)
        for position, actual in enumerate([*answered.answer, None]):
            before = answered.answer[:position]
            if position == room or (before and before[-1] in self.stop_token_ids):
                ended = [] if actual is None else [Choice(position, None, actual, float("inf"))]
                return [*choices, *ended]
            scores_V = sampler.scores(logits_NV[position], [*answered.prompt_ids, *before])
            expected = int(scores_V.argmax())
            if actual is None:
                choices.append(Choice(position, expected, None, float("inf")))
            elif actual != expected:
                margin = float(scores_V[expected] - scores_V[actual])
                choices.append(Choice(position, expected, actual, margin))
        return choices


def oracle_beside(
    base: BaseModel, same_weights: bool = False, layerwise: bool | None = None
) -> Oracle | LayerwiseOracle:
    """A second model beside `base`. `layerwise`: layer by layer; where it is None, only if memory
    is too small for the whole model."""
    if layerwise or (layerwise is None and not _fits(base)):
        try:
            return LayerwiseOracle.beside(base, same_weights)
        except IncompatibleBaseError as error:
            if layerwise:
                raise
            console.note(f"the second model is loaded whole: {error.message}")
    return Oracle.beside(base, same_weights)


def _fits(base: BaseModel) -> bool:
    """Whether memory has room for a second model; where it has not, a note says so."""
    size = 4 * base.info.num_parameters
    if _obstacle(base) is not None or size <= SHARE_OF_MEMORY * free_memory():
        return True
    console.note(
        f"a second model of {size / 1e9:.1f} GB in float32 is more than the free memory safely "
        "allows: it is read layer by layer"
    )
    return False


def _obstacle(base: BaseModel) -> str | None:
    """Why `base` cannot be held against its checkpoint layer by layer; None where it can."""
    info = base.info
    if info.source not in ("hub", "folder", "gguf", "embedded"):
        return "its weights are not all in one checkpoint"
    if info.quantized:
        return "it is quantised"
    if (info.device, info.dtype) != ("cpu", "float32"):
        return f"that is done in float32 on a CPU, and it is in {info.dtype} on {info.device}"
    return None
