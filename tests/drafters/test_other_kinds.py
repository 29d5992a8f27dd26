"""Checkpoints that draft for one base and are not read: refused by name, with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.small_engines import build_engine
from support.tiny_models import tiny_base

import medusa_kit
from medusa_kit.errors import ConfigError

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "speculators": ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]},
                    "an EAGLE-3 draft"),
    "EAGLE's own": ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
                     "draft_vocab_size": 32000}, "an EAGLE-3 draft"),
    "DFlash": ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16,
                "dflash_config": {"target_layer_ids": [1, 9, 17]}}, "a DFlash draft"),
    "transformers' DFlash": ({"model_type": "muse_glimmer_assistant", "block_size": 8,
                              "target_layer_ids": [1, 9]}, "a DFlash draft"),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    config, said = KINDS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said) as failed:
        medusa_kit.load("debug-tiny", draft_model=str(tmp_path), device="cpu")
    assert str(tmp_path) in str(failed.value)
    assert "hidden states after" in str(failed.value)
    engine = build_engine(tiny_base("llama"), draft_model=str(tmp_path))
    with pytest.raises(ConfigError, match=said):
        engine.generate([5, 6], drafter="draft-model", max_new_tokens=2)
