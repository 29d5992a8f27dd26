"""How each setting of transformers' GenerationConfig is treated, in one table.

A base has such a config, and a call of transformers' own generate() has another. A setting that
changes answers is either honoured, through transformers' own processors, or refused by name.
"""

from collections.abc import Container
from enum import Enum
from functools import cache
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.settings.sampling import NARROWING


class Treatment(Enum):
    HONOURED = "answers follow it"
    REQUEST = "each of our requests sets it, so the base's own value is not used"
    IDLE = "without effect unless there are beams, an assistant or a compiled forward"
    # Refused in a call, which asks for it; ignored in a base's own config.
    MANNER = "how transformers computes, drafts or returns, not which tokens it chooses"
    REFUSED = "another way of decoding"


HONOURED, REQUEST, IDLE, MANNER, REFUSED = Treatment
SETTINGS: dict[str, Treatment] = {
    # Which tokens may follow, and how likely they are.
    "repetition_penalty": HONOURED,
    "encoder_repetition_penalty": HONOURED,
    "no_repeat_ngram_size": HONOURED,
    "encoder_no_repeat_ngram_size": HONOURED,
    "bad_words_ids": HONOURED,
    "sequence_bias": HONOURED,
    "suppress_tokens": HONOURED,
    "begin_suppress_tokens": HONOURED,
    "min_length": HONOURED,
    "min_new_tokens": HONOURED,
    "forced_bos_token_id": HONOURED,
    "forced_eos_token_id": HONOURED,
    "exponential_decay_length_penalty": HONOURED,
    "renormalize_logits": HONOURED,
    "remove_invalid_values": HONOURED,
    "eos_token_id": HONOURED,
    "bos_token_id": HONOURED,
    "pad_token_id": HONOURED,
    # These do not matter to a greedy request.
    "top_h": HONOURED,
    "typical_p": HONOURED,
    "epsilon_cutoff": HONOURED,
    "eta_cutoff": HONOURED,
    "do_sample": REQUEST,
    "temperature": REQUEST,
    "top_k": REQUEST,
    "top_p": REQUEST,
    "min_p": REQUEST,
    "max_length": REQUEST,
    "max_new_tokens": REQUEST,
    "num_return_sequences": REQUEST,
    # Another way of decoding, or one that depends on more than the tokens.
    "num_beams": REFUSED,
    "num_beam_groups": REFUSED,
    "penalty_alpha": REFUSED,
    "dola_layers": REFUSED,
    "constraints": REFUSED,
    "force_words_ids": REFUSED,
    "guidance_scale": REFUSED,
    "watermarking_config": REFUSED,
    "stop_strings": REFUSED,
    "max_time": REFUSED,
    "token_healing": REFUSED,
    "early_stopping": IDLE,
    "length_penalty": IDLE,
    "diversity_penalty": IDLE,
    "low_memory": IDLE,
    "num_assistant_tokens": IDLE,
    "num_assistant_tokens_schedule": IDLE,
    "assistant_confidence_threshold": IDLE,
    "assistant_lookbehind": IDLE,
    "target_lookbehind": IDLE,
    "assistant_ensemble_weight": IDLE,
    "max_matching_ngram_size": IDLE,
    "speculation_type": IDLE,
    "decoder_start_token_id": IDLE,
    "compile_config": IDLE,
    "disable_compile": IDLE,
    "continuous_batching_config": IDLE,
    "transformers_version": IDLE,
    "use_cache": MANNER,
    "cache_implementation": MANNER,
    "cache_config": MANNER,
    "max_cache_len": MANNER,
    "prefill_chunk_size": MANNER,
    "is_assistant": MANNER,
    "prompt_lookup_num_tokens": MANNER,
    "assistant_early_exit": MANNER,
    "use_mtp": MANNER,
    "output_attentions": MANNER,
    "output_hidden_states": MANNER,
    "output_scores": MANNER,
    "output_logits": MANNER,
    "return_dict_in_generate": MANNER,
}
# Values other than None that ask for nothing; False for settings not listed.
NEUTRAL = {"num_beams": 1, "num_beam_groups": 1, "use_cache": True, "guidance_scale": 1.0,
           "penalty_alpha": 0.0}  # fmt: skip
INSTEAD = {
    "num_beams": "answers are greedy or sampled here, never by beam search; ",
    "stop_strings": "give them to each request, as `stop`; ",
    "max_time": "max_new_tokens of a request bounds an answer; ",
}
QUANTISED_CACHE = "quantized"


def check_own_settings(config: Any) -> None:
    """Raises ConfigError for what a base's own generation config asks for and is not possible."""
    for name in _names():
        treatment, value = SETTINGS.get(name, REFUSED), getattr(config, name, None)
        rounds = name == "cache_implementation" and value == QUANTISED_CACHE
        if (treatment is REFUSED and asks(name, value)) or rounds:
            raise ConfigError(
                f"the model's generation config has {name}={value!r}, which medusa-kit cannot "
                f"honour{expected(name)}",
                hint=f"{INSTEAD.get(name, '')}take it out of the model's generation_config.json; "
                f"on a model that is loaded, set its generation_config.{name} = None",
            )


def unusable(config: Any, error: Exception) -> ConfigError:
    """The error for values of a base's own generation config that transformers' processors
    refuse."""
    values = {name: getattr(config, name, None) for name in _names()}
    honoured = [f"{name}={value!r}" for name, value in values.items()
                if SETTINGS.get(name) is HONOURED and asks(name, value)]  # fmt: skip
    return ConfigError(
        f"the model's generation config has a value that transformers cannot use: {error} "
        f"(it sets {', '.join(honoured)})",
        hint="correct the model's generation_config.json; on a model that is loaded, its "
        "generation_config",
    )


def unavailable(config: Any) -> tuple[str, Any] | None:
    """(name, value) of the first setting of a call of generate() that cannot be honoured."""
    for name in _names():
        value = getattr(config, name, None)
        if SETTINGS.get(name, REFUSED) in (REFUSED, MANNER) and asks(name, value):
            return name, value
    return None


def own_sampling(config: Any) -> dict[str, Any]:
    """How a model's own config would sample, as far as it says, in the words of SamplingParams;
    nothing where it asks for greedy decoding or leaves sampling open. A temperature asks for
    sampling too, unless `do_sample` is false."""
    temperature, asks = getattr(config, "temperature", None), getattr(config, "do_sample", None)
    if temperature == 0 or not (temperature is not None if asks is None else asks):
        return {}
    options = {name: getattr(config, name, None) for name in NARROWING}
    temperature = 1.0 if temperature is None else temperature  # transformers' own
    return {"temperature": temperature} | {name: value for name, value in options.items() if value}


def asks_only_for(config: Any, names: Container[str]) -> bool:
    """Whether no setting but these and such as change no token is set to anything."""
    others = [name for name in _names() if name not in names]
    changing = [
        setting for setting in others if SETTINGS.get(setting, REFUSED) in (HONOURED, REFUSED)
    ]
    return not any(asks(name, getattr(config, name, None)) for name in changing)


def asks(name: str, value: Any) -> bool:
    """Whether this value of a setting asks for anything."""
    return value is not None and value != NEUTRAL.get(name, False)


def expected(name: str) -> str:
    return f"; expected {NEUTRAL[name]}" if name in NEUTRAL else ""


@cache
def _names() -> list[str]:
    """All settings of the installed transformers; those not in the table are refused."""
    from transformers import GenerationConfig

    return sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))
