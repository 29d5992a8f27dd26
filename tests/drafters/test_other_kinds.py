"""Checkpoints that draft for one base: which are read, which are refused by name, and DFlash and
EAGLE-3 drafts that do not fit their base, all before anything is loaded."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.native.dflash_folders import authors_folder, dflash_folder
from support.native.eagle_folders import eagle_folder
from support.native.mtp_folders import change_config, without_tensors
from support.small_engines import build_engine
from support.tiny_models import VOCAB, tiny_base

import medusa_kit
from medusa_kit.base.files import stored_config
from medusa_kit.drafters.native.dflash_files import dflash_config
from medusa_kit.drafters.native.other_kinds import kind_of, stored_dict
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError, MedusaKitError

AUTHORS = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16,
           "dflash_config": {"target_layer_ids": [1, 9, 17], "mask_token_id": 7}}  # fmt: skip
EAGLE = {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"],
         "draft_vocab_size": 8}  # fmt: skip
EAGLE_FORM = partial(eagle_folder, vocab=VOCAB, known=5, reads=[1, 2])
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "EAGLE's own": ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
                     "draft_vocab_size": 32000}, "an EAGLE draft outside the format `eagle3`"),
    "P-EAGLE": ({"speculators_model_type": "peagle"}, "an EAGLE draft outside the format"),
    "EAGLE-3 of Qwen3's class": ({**EAGLE, "transformer_layer_config": {"model_type": "qwen3",
                                  "num_hidden_layers": 1}}, "a layer of the class 'qwen3'"),
    "EAGLE-3 of two layers": ({**EAGLE, "transformer_layer_config": {"model_type": "llama",
                               "num_hidden_layers": 2}}, "an EAGLE-3 draft with 2 layers"),
    "EAGLE-3 with a norm": ({**EAGLE, "norm_before_fc": True}, "a norm before its projection"),
    "EAGLE-3 with norms": ({**EAGLE, "fc_norm": True}, "norms of what it reads"),
    "EAGLE-3.1": ({**EAGLE, "norm_output": True}, "a normed output fed back"),
    "EAGLE-3 without sizes": (EAGLE, "config cannot be read.*transformer_layer_config"),
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer": {"hidden_size": 48}}, "hidden size 48; that of the base is"),
        ({"vocab": 30}, "is for 30 tokens; the base has"),
        ({"known": 10**6}, "has 1000000 tokens; the base has"),
        ({"reads": [0, 1]}, r"outputs \[0, 1\] of the base's layers; expected some of 1 to"),
        ({"reads": [1, 99]}, r"outputs \[1, 99\] of the base's layers"),
        ({"reads": []}, "outputs"),
    ],
)
def test_an_eagle_draft_that_does_not_fit(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    base = stored_config("debug-tiny")
    sizes: Any = {"vocab": base.vocab_size, "known": 5, "reads": [1], **changes}
    layer = {"hidden_size": base.hidden_size, **sizes.pop("layer", {})}
    eagle_folder(tmp_path, 8, 5)
    change_eagle(tmp_path, sizes, layer)
    with pytest.raises(IncompatibleBaseError, match=said) as failed:
        medusa_kit.load("debug-tiny", draft_model=str(tmp_path), device="cpu")
    assert str(tmp_path) in str(failed.value)


def change_eagle(folder: Path, sizes: dict[str, Any], layer: dict[str, Any]) -> None:
    """The config alone."""
    stored = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    change_config(
        folder,
        transformer_layer_config={**stored, **layer, "vocab_size": sizes["vocab"]},
        draft_vocab_size=sizes["known"],
        eagle_aux_hidden_state_layer_ids=sizes["reads"],
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "lacks 1 tensors, among them 'fc.weight'"),
        (lambda tensors: tensors.pop("d2t"), "lacks 1 tensors, among them 'd2t'"),
        (lambda tensors: tensors.update(other=torch.ones(1)), "holds the tensor 'other'"),
        (lambda tensors: tensors.update({"fc.weight": torch.ones(2, 2)}), "cannot be loaded.*fc"),
        (lambda tensors: tensors["d2t"].add_(1), f"has tokens {VOCAB - 4} to {VOCAB} by its"),
    ],
)
def test_an_eagle_draft_with_other_tensors(spoil: Any, said: str, tmp_path: Path) -> None:
    path = eagle_folder(tmp_path, VOCAB, 5, [1, 2]) / "model.safetensors"
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    engine = build_engine(tiny_base("llama"), draft_model=str(tmp_path))
    with pytest.raises((CheckpointError, IncompatibleBaseError), match=f"(?s){said}"):
        engine.generate([5, 6], drafter="draft-model", max_new_tokens=2)


def test_an_eagle_draft_that_is_cut_off(tmp_path: Path) -> None:
    path = eagle_folder(tmp_path, VOCAB, 5, [1, 2]) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    engine = build_engine(tiny_base("llama"), draft_model=str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        engine.generate([5, 6], drafter="draft-model", max_new_tokens=2)


@pytest.mark.parametrize("form", [dflash_folder, EAGLE_FORM])
def test_a_base_that_hides_its_layers(form: Any, tmp_path: Path) -> None:
    engine = build_engine(tiny_base("gpt2"), draft_model=str(form(tmp_path)))
    with pytest.raises(IncompatibleBaseError, match="cannot be found"):
        engine.generate([5, 6], drafter="draft-model", max_new_tokens=2)


@pytest.mark.parametrize("part", ["fc", "layers.1.mlp"])
def test_tensors_that_are_missing(part: str, tmp_path: Path) -> None:
    without_tensors(dflash_folder(tmp_path), part)
    engine = build_engine(tiny_base("llama"), draft_model=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"lacks [13] tensors"):
        engine.generate([5, 6], drafter="draft-model", max_new_tokens=2)


@pytest.mark.parametrize("form", [dflash_folder, EAGLE_FORM])
def test_options_of_draft_models_alone(form: Any, tmp_path: Path) -> None:
    engine = build_engine(tiny_base("llama"), draft_model=str(form(tmp_path)))
    given: Any = {"drafter": "draft-model", "max_new_tokens": 8}
    with pytest.raises(ConfigError, match=r"option max_length .* is an? (DFlash|EAGLE-3) draft"):
        engine.generate([5, 6], **given, drafter_options={"max_length": 2})
    found = engine.generate([5, 6], **given, drafter_options={"num_nodes": 3})
    assert any("of 2.00 drafted tokens" in note for note in found.stats.drafter_notes)


@pytest.mark.parametrize("form", [dflash_folder, EAGLE_FORM])
def test_one_inside_a_draft_model(form: Any, tmp_path: Path) -> None:
    inner = str(form(tmp_path))
    engine = build_engine(tiny_base("llama"), draft_model=tiny_base("llama"))
    staged = {"staged": {"drafter": "draft-model", "draft_model": inner}}
    with pytest.raises(ConfigError, match=r"(DFlash|EAGLE-3) draft, which reads layers"):
        engine.generate([5], drafter="draft-model", drafter_options=staged, max_new_tokens=2)


def test_the_authors_form_is_read_as_transformers_class(tmp_path: Path) -> None:
    found = dflash_config(str(authors_folder(tmp_path)))
    assert found.model_type == "muse_glimmer_assistant"
    assert (found.block_size, found.mask_token_id, found.target_layer_ids) == (5, 3, [1, 0])
    assert found.rope_parameters["rope_theta"] == 500000.0
    assert torch.tensor(found.rms_norm_eps).allclose(torch.tensor(1e-5))


def test_another_form_than_lists(tmp_path: Path) -> None:
    """Of what a config is first told by."""
    assert kind_of({"architectures": 5}) is None
    assert kind_of({"architectures": "DFlashDraftModel"}) == kind_of(AUTHORS)
    (tmp_path / "config.json").write_text("[5]")
    assert stored_dict(str(tmp_path)) is None


LAYER = "transformer_layer_config"


@pytest.mark.parametrize(
    "changes",
    [
        {"speculators_config": [1]},
        {"speculators_config": {"proposal_methods": [5]}},
        {"draft_vocab_size": float("inf")},
        {"eagle_aux_hidden_state_layer_ids": 5},
        {LAYER: None},
        {LAYER: {"num_attention_heads": 0, "head_dim": None}},
        {LAYER: {"num_key_value_heads": 0}},
        {LAYER: {"num_key_value_heads": 3}},
        {LAYER: {"head_dim": 7}},
        {LAYER: {"intermediate_size": 10**30}},
        {LAYER: {"hidden_act": "nope"}},
        {LAYER: {"rope_scaling": {"rope_type": "nope"}}},
    ],
)
def test_an_eagle_config_of_impossible_values(changes: dict[str, Any], tmp_path: Path) -> None:
    stored = json.loads((EAGLE_FORM(tmp_path) / "config.json").read_text())[LAYER]
    if isinstance(layer := changes.get(LAYER), dict):
        changes = {LAYER: {**stored, **layer}}
    check_refused(tmp_path, changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_layer_ids": "01"},
        {"target_layer_ids": [None]},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"intermediate_size": -1},
        {"block_size": 10**9},
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": "1"},
        {"hidden_act": "nope"},
        {"layer_types": ["nope", "nope"]},
        {"rope_parameters": {"rope_type": "nope", "rope_theta": 1.0}},
    ],
)
def test_a_dflash_config_of_impossible_values(changes: dict[str, Any], tmp_path: Path) -> None:
    check_refused(dflash_folder(tmp_path), changes)


def check_refused(folder: Path, changes: dict[str, Any]) -> None:
    """By an error that names the folder and says what to do."""
    change_config(folder, **changes)
    engine = build_engine(tiny_base("llama"), draft_model=str(folder))
    with pytest.raises(MedusaKitError) as failed:
        engine.generate([5, 6], drafter="draft-model", max_new_tokens=2)
    assert str(folder) in failed.value.message
    assert failed.value.hint


FORMS = pytest.mark.parametrize("form", [dflash_folder, EAGLE_FORM])


@FORMS
def test_weights_that_are_no_numbers(form: Any, tmp_path: Path) -> None:
    path = form(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"].fill_(torch.nan)
    save_file(tensors, path, {"format": "pt"})
    engine = build_engine(tiny_base("llama"), draft_model=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN"):
        engine.generate([5, 6], drafter="draft-model", max_new_tokens=2)


def test_an_eagle_draft_in_a_form_that_is_not_read_is_refused_first(tmp_path: Path) -> None:
    """Before the base is loaded."""
    EAGLE_FORM(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds no weights \(.safetensors\)"):
        medusa_kit.load("debug-tiny", draft_model=str(tmp_path), device="cpu")


@FORMS
def test_numbers_that_overflow(form: Any, tmp_path: Path) -> None:
    """Each is finite: guesses are never right, which is told once, and answers are as ever."""
    path = form(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"].fill_(3e38)
    save_file(tensors, path, {"format": "pt"})
    engine = build_engine(tiny_base("llama"), draft_model=str(tmp_path))
    plain = engine.generate([5, 6], drafter="none", max_new_tokens=6).token_ids
    found = engine.generate([5, 6], drafter="draft-model", max_new_tokens=6)
    assert found.token_ids == plain
    (note,) = (note for note in found.stats.drafter_notes if "NaN or infinite" in note)
    assert str(tmp_path) in note


@FORMS
def test_numbers_that_do_not_overflow(form: Any, tmp_path: Path) -> None:
    form(tmp_path)
    engine = build_engine(tiny_base("llama"), draft_model=str(tmp_path))
    found = engine.generate([5, 6], drafter="draft-model", max_new_tokens=6)
    assert "NaN" not in " ".join(found.stats.drafter_notes)


@FORMS
@pytest.mark.parametrize("kept", [None, 0, -1])
def test_weights_are_looked_for_first(form: Any, kept: int | None, tmp_path: Path) -> None:
    """Before the base is loaded, which is none of the draft's here."""
    path = form(tmp_path) / "model.safetensors"
    stored = path.read_bytes()
    path.unlink()
    if kept is not None:
        path.write_bytes(stored[:kept])
    with pytest.raises(CheckpointError, match=r"holds no weights|cannot be loaded") as failed:
        medusa_kit.load("debug-tiny", draft_model=str(tmp_path), device="cpu")
    assert str(tmp_path) in failed.value.message
    assert failed.value.hint
