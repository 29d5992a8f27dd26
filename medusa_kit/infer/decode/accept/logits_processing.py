"""The processors that turn a node's logits into the distribution from which its token is chosen.

They are transformers' own list for the base's generation config and the request, in generate's
order: repetition penalty and the like, then ours (presence and frequency penalty, bias, a grammar's
mask), then temperature, top-k, top-p and min-p. generation_settings.py says which settings the
config may have. Ours are transformers LogitsProcessors too, so generate can use them.

Shapes: B rows, T tokens of a prefix, V vocabulary.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.accept.generation_settings import (
    asks_only_for,
    check_own_settings,
    unusable,
)
from medusa_kit.infer.decode.accept.grammar import GrammarMask
from medusa_kit.infer.memory import is_device_lost
from medusa_kit.settings.sampling import OF_TOKENIZER, SamplingParams
from medusa_kit.transfer import to_device

# Settings whose processors are made here. The ids play a part in those of other settings only.
USUAL = ("repetition_penalty", "do_sample", "temperature", "top_k", "top_p", "min_p",
         "eos_token_id", "bos_token_id", "pad_token_id")  # fmt: skip


class CountPenalty(LogitsProcessor):
    """OpenAI's formula: a token that occurs n > 0 times loses presence + n · frequency.

    Only generated tokens are counted, not the prompt.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer_BT = input_ids[:, self.prompt_length :]
        ones_BT = torch.ones_like(answer_BT, dtype=scores.dtype)
        counts_BV = torch.zeros_like(scores).scatter_add_(1, answer_BT, ones_BT)
        return scores - self.presence * (counts_BV > 0) - self.frequency * counts_BV


class TokenBias(LogitsProcessor):
    """Adds a number to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self.ids = torch.tensor(list(bias), device=device)
        self.values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, self.ids, self.values.to(scores.dtype).expand(len(scores), -1))


def check_bias_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises ConfigError for a bias on a token that the model does not have."""
    for token in params.logit_bias or ():
        if token >= vocab_size:
            raise ConfigError(
                f"logit_bias names token id {token}; expected 0..{vocab_size - 1}",
                hint=OF_TOKENIZER,
            )


class Settings(Protocol):
    """What processors need of a base model."""

    @property
    def generation_config(self) -> Any: ...

    @property
    def generation(self) -> Any:
        """What has transformers' functions of generation."""

    @property
    def num_logits(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


def logits_processors(
    base: Settings,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    mask: GrammarMask | None = None,
) -> Sequence[Any]:
    """The list for these parameters and the base's generation config; if empty, logits stay as
    they are. `mask`: of the request's grammar.

    Raises ConfigError for a bias on a token that the model does not have, and for what the base's
    generation config asks for and is not possible.
    """
    check_own_settings(base.generation_config)
    check_bias_ids(params, base.num_logits)
    kit_processors = _kit_processors(params, len(prompt_ids), base.device)
    if mask is not None:
        kit_processors.append(mask)
    try:
        config = _generation_config(base, params)
        if asks_only_for(config, USUAL):
            return _usual_processors(config, kit_processors)
        config.max_length = len(prompt_ids) + max_new_tokens  # where an end is forced
        return base.generation._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt_ids),
            encoder_input_ids=torch.tensor([list(prompt_ids)], device=base.device),
            logits_processor=kit_processors,
            device=base.device,
            model_kwargs={},
        )
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        if is_device_lost(error):  # which is no fault of the config
            raise
        raise unusable(base.generation_config, error) from error


def _usual_processors(config: Any, kit_processors: list[LogitsProcessor]) -> list[LogitsProcessor]:
    """transformers' list for a config without other settings than USUAL, in its order. Its function
    for all settings is part of its models' code, which takes seconds to import."""
    made = list[LogitsProcessor]()
    if config.repetition_penalty not in (None, 1.0):
        made.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    made += kit_processors
    if not config.do_sample:
        return made
    if config.temperature not in (None, 1.0):
        made.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        made.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1.0:
        made.append(TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        made.append(MinPLogitsWarper(config.min_p))
    return made


def check_own_values(base: Settings) -> None:
    """Raises ConfigError for a base's generation config that would fail during a request.

    Its processors are tried once on a row of zeros: some check their values only then.
    """
    prefix_BT = torch.zeros((1, 1), dtype=torch.long, device=base.device)
    scores_BV = torch.zeros((1, base.num_logits), dtype=torch.float32, device=base.device)
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        processors = logits_processors(base, params, [0], max_new_tokens=1)
        try:
            for process in processors:
                process(prefix_BT, scores_BV)
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            if is_device_lost(error):
                raise
            raise unusable(base.generation_config, error) from error


def _kit_processors(
    params: SamplingParams, prompt_length: int, device: torch.device
) -> list[LogitsProcessor]:
    """The processors that transformers lacks."""
    processors: list[LogitsProcessor] = []
    if params.presence_penalty or params.frequency_penalty:
        processors.append(
            CountPenalty(params.presence_penalty, params.frequency_penalty, prompt_length)
        )
    if params.logit_bias:
        processors.append(TokenBias(params.logit_bias, device))
    return processors


def _generation_config(base: Settings, params: SamplingParams) -> Any:
    """The base's generation config, with the request's settings in place of its own."""
    config = copy.deepcopy(base.generation_config)
    config.do_sample = not params.greedy
    config.temperature = None if params.greedy else params.temperature
    config.top_k = 0 if params.top_k is None else params.top_k
    config.top_p = 1.0 if params.top_p is None else params.top_p
    config.min_p = params.min_p
    if params.repetition_penalty is not None:
        config.repetition_penalty = float(params.repetition_penalty)
    # generate() sets this before it builds processors; penalties on the length need it
    ids = config.eos_token_id
    eos = [ids] if isinstance(ids, int) else ids
    config._eos_token_tensor = None if eos is None else to_device(eos, base.device)
    return config
