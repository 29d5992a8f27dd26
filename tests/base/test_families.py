"""Families that cannot hold a tree are refused by their config alone, with the reason."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_engines import build_engine
from support.tiny_models import COMMON, tiny_base, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel, T5ForConditionalGeneration

from medusa_kit.base.families import (
    MIN_CONTEXT,
    needs_chains,
    refuse_impossible,
    why_impossible,
)
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.base.stored_tensors import skeleton_of
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer import check_texts
from medusa_kit.infer.verifier import Verifier

STATEFUL = ["mamba2", "bamba", "nemotron_h", "granitemoehybrid", "qwen3_next", "olmo_hybrid"]
REASONS = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), "only from the start of a text"),
    **dict.fromkeys(("rwkv", "xlstm", "recurrent_gemma"), "outside of transformers'"),
    **dict.fromkeys(("bloom", "mpt"), "ALiBi"),
    "gpt_neo": "count slots",
    "deepseek_v4": "by an index",
    "openai-gpt": "no KV cache",
    "xlnet": "no position ids",
    "bart": "encoder-decoder",
}


@pytest.mark.parametrize("family", REASONS)
def test_refused_by_name_and_for_the_right_reason(family: str) -> None:
    with pytest.raises(IncompatibleBaseError, match=REASONS[family]) as caught:
        refuse_impossible(AutoConfig.for_model(family), "some/model")
    assert f"'some/model' ({family})" in caught.value.message
    assert "docs/models.md" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("family", "arguments", "reason"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "convolutions"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("lfm2", {"layer_types": ["full_attention"] * 2}, None),
        ("falcon", {"alibi": False}, None),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}, None),
    ],
)
def test_it_is_the_layers_that_count(family: str, arguments: dict, reason: str | None) -> None:
    layers = {"num_hidden_layers": 2} if "layer_types" in arguments else {}
    config = AutoConfig.for_model(family, **layers, **arguments)
    why = needs_chains(config) or why_impossible(config)
    assert why is None if reason is None else reason in (why or "")


@pytest.mark.parametrize("family", [*STATEFUL, "zamba2", "falcon_h1"])
def test_a_state_asks_for_chains(family: str) -> None:
    config = AutoConfig.for_model(family)
    assert why_impossible(config) is None
    assert re.search("carries a state|half of its heads", needs_chains(config) or "")


@pytest.mark.parametrize("family", ["mpt", "t5"])
def test_a_folder_is_refused_before_any_weight_is_read(family: str, tmp_path: Path) -> None:
    """The folder holds no weights at all."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(IncompatibleBaseError, match="draft tokens cannot be verified on"):
        load_base_model(str(tmp_path), device="cpu")


def model_of(family: str, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **arguments)).eval()


def test_models_in_memory_are_refused_too() -> None:
    mamba = model_of("mamba", vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)
    bloom = model_of("bloom", vocab_size=96, hidden_size=32, n_layer=2, n_head=4)
    for model in (mamba, bloom):
        with pytest.raises(IncompatibleBaseError, match=model.config.model_type):
            Verifier(wrap_model(model))


def test_the_self_check_refuses_what_no_name_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model under a name that is not on the list, refused with what went wrong."""
    from medusa_kit.infer import verifier
    from medusa_kit.infer.chains import choice
    from medusa_kit.infer.chains.choice import self_check

    monkeypatch.setattr(verifier, "refuse_impossible", lambda *_: None)
    bloom = model_of("bloom", vocab_size=96, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(IncompatibleBaseError, match="a forward failed"):
        self_check(wrap_model(bloom))
    lfm2 = model_of("lfm2", **COMMON, layer_types=["conv", "full_attention", "conv"])
    monkeypatch.setattr(choice, "needs_chains", lambda config: None)  # as trees
    with pytest.raises(IncompatibleBaseError):
        self_check(wrap_model(lfm2))


def test_a_soft_cap_is_never_left_out(tmp_path: Path) -> None:
    """SDPA drops it silently (transformers 5.17) or refuses (newer ones): whatever a model came
    with, what is loaded computes with its cap, also layer by layer."""
    model = tiny_model("gemma2")
    ids = torch.tensor([list(range(3, 40))])
    expected = model(ids).logits
    assert not torch.allclose(
        tiny_model("gemma2", attn_logit_softcapping=1e6)(ids).logits, expected
    )
    model.config._attn_implementation = "sdpa"
    base = wrap_model(model)
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(base.model(ids).logits, expected)
    assert skeleton_of(model.config).config._attn_implementation == "eager"
    other = tiny_model("llama")
    other.set_attn_implementation("sdpa")
    assert wrap_model(other).model.config._attn_implementation == "sdpa"


def test_encoder_decoders_and_models_without_an_output_embedding() -> None:
    t5 = AutoConfig.for_model("t5", vocab_size=96, d_model=16, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(IncompatibleBaseError, match="encoder-decoder"):
        wrap_model(T5ForConditionalGeneration(t5))
    config = AutoConfig.for_model("llama", **COMMON)
    with pytest.raises(IncompatibleBaseError, match="LlamaModel has no output embedding") as caught:
        wrap_model(LlamaModel(config))
    assert "causal language model" in (caught.value.hint or "")


def test_a_quantised_output_embedding_is_refused() -> None:
    model = tiny_model("llama")
    weight = model.lm_head.weight.data.to(torch.int8)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(IncompatibleBaseError, match="in floating point") as caught:
        wrap_model(model)
    assert "quantisation" in (caught.value.hint or "")


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gptj"])
def test_families_that_transformers_has_no_sdpa_for_load_from_a_folder(
    family: str, tmp_path: Path, chat_base: BaseModel
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    chat_base.tokenizer.save_pretrained(tmp_path)
    loaded = load_base_model(str(tmp_path), device="cpu")
    assert loaded.info.fingerprint == tiny_base(family).info.fingerprint


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_context_without_room_for_the_check_is_refused(family: str) -> None:
    longest = max(check_texts.PROMPT_LENGTHS) + len(check_texts.TREES) * len(check_texts.KEPT)
    assert longest == MIN_CONTEXT
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    for length in (1, 5, MIN_CONTEXT - 1):
        with pytest.raises(IncompatibleBaseError, match=f"its context holds {length} tokens"):
            build_engine(wrap_model(tiny_model(family, **{name: length}), None, "short"))
    engine = build_engine(
        wrap_model(tiny_model(family, **{name: MIN_CONTEXT}), None, "short"), guesses="paying"
    )
    assert len(engine.generate([3], max_new_tokens=4, drafter="suffix").token_ids) == 4
