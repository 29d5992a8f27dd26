"""What becomes of each setting of transformers' GenerationConfig: the one table that decides.

A base brings such a config along, and a call of transformers' own generate() another one. Whatever
changes an answer is honoured, through transformers' own processors, or refused by name.
"""

from enum import Enum
from functools import cache
from typing import Any

from medusa_kit.errors import ConfigError


class Treatment(Enum):
    HONOURED = "the answer follows it"
    REQUEST = "each request says it; the base's own is for requests that do not, and ours all do"
    IDLE = "plain generate makes nothing of it without beams, an assistant or a compiled forward"
    # A call that names one of these wants it done; in a base's own config it is no matter.
    MANNER = "how transformers computes, drafts or hands back, not which tokens it names"
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
    # Of these, a greedy request has no use.
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
    # Another way of decoding, or something beside the tokens decides.
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
# Values that ask for nothing, beside None; False where none is named.
NEUTRAL = {"num_beams": 1, "num_beam_groups": 1, "use_cache": True, "guidance_scale": 1.0,
           "penalty_alpha": 0.0}  # fmt: skip
INSTEAD = {
    "num_beams": "answers are greedy or sampled here, never by beam search; ",
    "stop_strings": "give them to each request, as `stop`; ",
    "max_time": "max_new_tokens of a request bounds an answer; ",
}
QUANTISED_CACHE = "quantized"


def check_own_settings(config: Any) -> None:
    """Raises ConfigError for what a base's own generation config asks for and cannot have."""
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
    """For values of a base's own generation config that transformers' processors refuse."""
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


def asks(name: str, value: Any) -> bool:
    """Whether this value of a setting asks for anything."""
    return value is not None and value != NEUTRAL.get(name, False)


def expected(name: str) -> str:
    return f"; expected {NEUTRAL[name]}" if name in NEUTRAL else ""


@cache
def _names() -> list[str]:
    """Of all settings of this transformers: one that is newer than the table is refused."""
    from transformers import GenerationConfig

    return sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))
