"""Checkpoints that draft for one base: which are read, which are refused by name, and DFlash drafts
that do not fit their base, all before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.native.dflash_folders import authors_folder, dflash_folder
from support.native.mtp_folders import change_config, without_tensors
from support.small_engines import build_engine
from support.tiny_models import tiny_base

import medusa_kit
from medusa_kit.base.files import stored_config
from medusa_kit.drafters.native.dflash_files import dflash_config
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError

AUTHORS = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16,
           "dflash_config": {"target_layer_ids": [1, 9, 17], "mask_token_id": 7}}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "speculators": ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]},
                    "an EAGLE-3 draft"),
    "EAGLE's own": ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
                     "draft_vocab_size": 32000}, "an EAGLE-3 draft"),
    "speculators' DFlash": ({"speculators_model_type": "dflash",
                             "architectures": ["DFlashDraftModel"]}, "format of speculators"),
    "DFlash-2": ({"architectures": ["DFlash2DraftModel"], "model_type": "qwen3"},
                 "a DFlash-2 draft"),
    "DFlash with biases": ({**AUTHORS, "attention_bias": True}, "biases in attention"),
    "DFlash with windows": ({**AUTHORS, "use_sliding_window": True, "sliding_window": 8,
                             "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
                            "attention over a window"),
    "DFlash without a mask token": ({**AUTHORS, "dflash_config": {"target_layer_ids": [1]}},
                                    "config cannot be read.*mask_token_id"),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    config, said = KINDS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said) as failed:
        medusa_kit.load("debug-tiny", draft_model=str(tmp_path), device="cpu")
    assert str(tmp_path) in str(failed.value)
    engine = build_engine(tiny_base("llama"), draft_model=str(tmp_path))
    with pytest.raises(ConfigError, match=said):
        engine.generate([5, 6], drafter="draft-model", max_new_tokens=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 48}, "hidden size 48; that of the base is 64"),
        ({"target_layer_ids": [0, 3]}, r"layers \[0, 3\]; expected some of 0 to"),
        ({"target_layer_ids": []}, "reads the base's layers"),
        ({"mask_token_id": 10**6}, "mask token 1000000; the base has"),
        ({"block_size": 1}, "blocks of 1 tokens"),
    ],
)
def test_what_does_not_fit_the_base(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """debug-tiny's config is held against the draft's."""
    hidden = stored_config("debug-tiny").hidden_size
    dflash_folder(tmp_path, layers=(0,), hidden_size=hidden)
    change_config(tmp_path, **changes)
    said = said.replace("is 64", f"is {hidden}")
    with pytest.raises(IncompatibleBaseError, match=said) as failed:
        medusa_kit.load("debug-tiny", draft_model=str(tmp_path), device="cpu")
    assert str(tmp_path) in str(failed.value)


def test_a_base_that_hides_its_layers(tmp_path: Path) -> None:
    engine = build_engine(tiny_base("gpt2"), draft_model=str(dflash_folder(tmp_path)))
    with pytest.raises(IncompatibleBaseError, match="cannot be found"):
        engine.generate([5, 6], drafter="draft-model", max_new_tokens=2)


@pytest.mark.parametrize("part", ["fc", "layers.1.mlp"])
def test_tensors_that_are_missing(part: str, tmp_path: Path) -> None:
    without_tensors(dflash_folder(tmp_path), part)
    engine = build_engine(tiny_base("llama"), draft_model=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"lacks [13] tensors"):
        engine.generate([5, 6], drafter="draft-model", max_new_tokens=2)


def test_options_of_draft_models_alone(tmp_path: Path) -> None:
    engine = build_engine(tiny_base("llama"), draft_model=str(dflash_folder(tmp_path)))
    given: Any = {"drafter": "draft-model", "max_new_tokens": 8}
    with pytest.raises(ConfigError, match=r"option width .* DFlash draft"):
        engine.generate([5, 6], **given, drafter_options={"width": 2})
    found = engine.generate([5, 6], **given, drafter_options={"num_nodes": 3})
    assert any("of 2.00 drafted tokens" in note for note in found.stats.drafter_notes)


def test_one_inside_a_draft_model(tmp_path: Path) -> None:
    inner = str(dflash_folder(tmp_path))
    engine = build_engine(tiny_base("llama"), draft_model=tiny_base("llama"))
    staged = {"staged": {"drafter": "draft-model", "draft_model": inner}}
    with pytest.raises(ConfigError, match="is a DFlash draft, which reads layers"):
        engine.generate([5], drafter="draft-model", drafter_options=staged, max_new_tokens=2)


def test_the_authors_form_is_read_as_transformers_class(tmp_path: Path) -> None:
    found = dflash_config(str(authors_folder(tmp_path)))
    assert found.model_type == "muse_glimmer_assistant"
    assert (found.block_size, found.mask_token_id, found.target_layer_ids) == (5, 3, [1, 0])
    assert found.rope_parameters["rope_theta"] == 500000.0
    assert torch.tensor(found.rms_norm_eps).allclose(torch.tensor(1e-5))
