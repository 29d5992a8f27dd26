"""What a base's generation config asks for: the answer of plain generate, or a refusal by name.

The oracle is a second model with the same config, asked through transformers' own generate.

Shapes: V vocabulary.
"""

from typing import Any

import pytest
import torch
from support.partly_knowing import PartlyKnowing, plain_answer
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import STOP, tiny_base, tiny_model
from transformers import GenerationConfig, WatermarkingConfig

import medusa_kit
from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.accept.generation_settings import (
    HONOURED,
    REFUSED,
    SETTINGS,
    check_own_settings,
)
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.settings.sampling import SamplingParams

TOKENS = 24
PROMPT = random_prompt(6, 2)
FREE = plain_answer("llama", PROMPT, TOKENS)
GREEDY: dict[str, Any] = {
    "repetition_penalty": 1.6,
    "encoder_repetition_penalty": 3.0,
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": [[FREE[0]], [FREE[1], FREE[2]]],
    "sequence_bias": {(FREE[0],): -5.0, (9,): 4.0},
    "suppress_tokens": FREE[:2],
    "begin_suppress_tokens": FREE[:1],
    "forced_eos_token_id": STOP,
    "exponential_decay_length_penalty": (3, 1.9),
}
# These need an answer that would end, or a prompt of one token.
SAMPLED: dict[str, Any] = {"typical_p": 0.5, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02,
                           "top_h": 0.4, "renormalize_logits": True}  # fmt: skip
MODEST: dict[str, Any] = {"min_length": 20, "min_new_tokens": 9}
# Equal to what there is without them, here: no infinities, nothing that begins or is padded.
UNSEEN = {"remove_invalid_values": True, "renormalize_logits": True, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": STOP}  # fmt: skip


def plainly(settings: dict[str, Any], prompt: list[int], tokens: int = TOKENS) -> list[int]:
    model, ids = tiny_model("llama"), torch.tensor([prompt])
    model.generation_config.update(**settings)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def decoded(settings: dict[str, Any], prompt: list[int], tokens: int = TOKENS) -> list[list[int]]:
    """By random heads and by a drafter that knows much of the truth, so that paths are long."""
    base = tiny_base("llama")
    base.model.generation_config.update(**settings)
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY)
    by_heads = engine.generate(prompt, max_new_tokens=tokens).token_ids
    row = make_request(engine.verifier, prompt, SamplingParams(), tokens)
    drafter = PartlyKnowing({tuple(prompt): plainly(settings, prompt, tokens)})
    for _ in Scheduler(engine.verifier).run([row], drafter):
        pass
    return [by_heads, row.token_ids]


@pytest.mark.parametrize("name", GREEDY)
def test_a_setting_changes_the_answer_as_it_does_plain_generates(name: str) -> None:
    settings = {name: GREEDY[name]}
    expected = plainly(settings, PROMPT)
    assert expected != FREE
    assert decoded(settings, PROMPT) == [expected] * 2


@pytest.mark.parametrize("name", MODEST)
def test_an_answer_is_kept_from_ending(name: str) -> None:
    stop = {"eos_token_id": FREE[4]}
    settings = {name: MODEST[name], **stop}
    expected = plainly(settings, PROMPT)
    assert len(expected) > len(plainly(stop, PROMPT))
    assert decoded(settings, PROMPT) == [expected] * 2


def test_the_first_token_of_all_is_forced() -> None:
    settings = {"forced_bos_token_id": 17}
    expected = plainly(settings, PROMPT[:1])
    assert expected[0] == 17
    assert decoded(settings, PROMPT[:1]) == [expected] * 2


def test_settings_that_show_nowhere_here_are_taken() -> None:
    assert decoded(UNSEEN, PROMPT) == [plainly(UNSEEN, PROMPT)] * 2


@pytest.mark.parametrize("name", SAMPLED)
def test_draws_follow_the_distribution_of_plain_generate(name: str) -> None:
    model, ids = tiny_model("llama"), torch.tensor([PROMPT])
    model.generation_config.update(**{name: SAMPLED[name]})
    torch.manual_seed(5)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=True, top_k=0,
        temperature=0.7, output_scores=True, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    params = SamplingParams(0.7, acceptance="typical")  # scores without the noise of draws
    sampler = Sampler(wrap_model(model), params, PROMPT, 6)
    plain = Sampler(tiny_base("llama"), params, PROMPT, 6)
    for step, (logits_1V, scores_1V) in enumerate(zip(out.logits, out.scores, strict=True)):
        prefix = out.sequences[0, : len(PROMPT) + step].tolist()
        distribution_V = sampler.scores(logits_1V[0], prefix).double().softmax(-1)
        torch.testing.assert_close(
            distribution_V, scores_1V[0].double().softmax(-1), atol=1e-6, rtol=0
        )
        if name != "renormalize_logits":
            others_V = plain.scores(logits_1V[0], prefix).softmax(-1)
            assert (distribution_V == 0).sum() > (others_V == 0).sum()


REFUSALS: dict[str, Any] = {
    "num_beams": 3, "num_beam_groups": 2, "penalty_alpha": 0.6, "dola_layers": "low",
    "constraints": ["some"], "force_words_ids": [[5]], "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(), "stop_strings": ["end"], "max_time": 3.0,
    "token_healing": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(tiny_base("llama"))


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_honoured_is_refused_by_name(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.base.model.generation_config, name, REFUSALS[name])
    with pytest.raises(ConfigError, match=f"generation config has {name}=") as caught:
        engine.generate(PROMPT, max_new_tokens=4)
    assert f"generation_config.{name} = None" in str(caught.value.hint)
    with pytest.raises(ConfigError, match=f"generation config has {name}="):
        engine.stream(PROMPT, max_new_tokens=4)


def test_a_cache_that_rounds_is_refused_and_others_are_no_matter() -> None:
    config = GenerationConfig(cache_implementation="hybrid", use_cache=False, output_scores=True)
    check_own_settings(config)
    with pytest.raises(ConfigError, match="cache_implementation='quantized'"):
        check_own_settings(GenerationConfig(cache_implementation="quantized"))


def test_a_base_is_refused_before_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_kit.engine import load as loading

    base = tiny_base("llama")
    base.model.generation_config.num_beams = 2
    monkeypatch.setattr(loading, "base_for_decoding", lambda *_, **__: base)
    monkeypatch.setattr(loading, "build_engine", None)
    with pytest.raises(ConfigError, match=r"num_beams=2, which .* expected 1") as caught:
        medusa_kit.load("debug-tiny")
    assert "never by beam search" in str(caught.value.hint)


def test_every_setting_has_its_treatment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of this transformers, all of them; of a newer one, any that asks for something."""
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    left = SETTINGS.keys() - known
    assert known <= SETTINGS.keys()
    assert not left, "no setting of transformers"
    tested = GREEDY.keys() | MODEST.keys() | SAMPLED.keys() | UNSEEN.keys()
    honoured = {name for name, treatment in SETTINGS.items() if treatment is HONOURED}
    assert honoured - tested == {"forced_bos_token_id"}
    assert {n for n, treatment in SETTINGS.items() if treatment is REFUSED} == REFUSALS.keys()
    monkeypatch.delitem(SETTINGS, "output_scores")
    with pytest.raises(ConfigError, match="output_scores=True"):
        check_own_settings(GenerationConfig(output_scores=True))


WRONG_VALUES: dict[str, Any] = {
    "eos_token_id": "abc",
    "repetition_penalty": "high",
    "encoder_repetition_penalty": -1,
    "no_repeat_ngram_size": "2",
    "bad_words_ids": [[9999]],  # refused only when scores are there
    "exponential_decay_length_penalty": [1],
    "forced_bos_token_id": 9999,
    "typical_p": "x",  # in use when sampling
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_value_is_an_error_when_the_base_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_kit.engine import load as loading

    base = tiny_base("llama")
    setattr(base.model.generation_config, name, WRONG_VALUES[name])
    monkeypatch.setattr(loading, "base_for_decoding", lambda *_, **__: base)
    with pytest.raises(ConfigError, match="generation config has a value") as caught:
        medusa_kit.load("debug-tiny")
    assert f"{name}={WRONG_VALUES[name]!r}" in str(caught.value)
    assert "generation_config.json" in str(caught.value.hint)


def test_a_wrong_value_of_a_loaded_model_is_an_error_of_the_request() -> None:
    base = tiny_base("llama")
    engine = build_engine(base)
    base.model.generation_config.repetition_penalty = -1
    with pytest.raises(ConfigError, match="strictly positive"):
        engine.generate(PROMPT, max_new_tokens=4)
