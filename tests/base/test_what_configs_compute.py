"""What of a config counts as another config: what changes logits, and nothing else."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model

from medusa_kit.base.origin import CONFIG, compare
from medusa_kit.base.remembered_configs import computed_by

NOTHING: dict[str, Any] = {
    "id2label": {0: "no", 1: "yes", 2: "perhaps"}, "problem_type": "regression",
    "task_specific_params": {"summary": {"max_length": 3}}, "tokenizer_class": "MyTokenizer",
    "output_router_logits": True, "use_cache": False, "unsloth_fixed": True,
    "eos_token_id": 3, "initializer_range": 0.7, "attention_dropout": 0.4, "attn_pdrop": 0.4,
    "resid_pdrop": 0.4, "embd_pdrop": 0.4, "summary_first_dropout": 0.4, "classifier_dropout": 0.4,
    "router_aux_loss_coef": 0.4, "router_jitter_noise": 0.4, "pretraining_tp": 2,
    "chunk_size_feed_forward": 2, "gradient_checkpointing": True, "do_sample": True,
    "repetition_penalty": 3.0, "summary_type": "first",
}  # fmt: skip
SOMETHING: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 0.5, "hidden_act": "relu"},
    "gpt2": {"activation_function": "relu", "layer_norm_epsilon": 0.5,
             "scale_attn_weights": False},
    "mixtral": {"num_experts_per_tok": 1, "hidden_act": "relu", "sliding_window": 2},
}  # fmt: skip


def logits_with(family: str, changes: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """(what its config computes, logits) of a model with the same weights and these values."""
    model = tiny_model(family)
    config = type(model.config).from_dict({**model.config.to_dict(), **changes})
    config._attn_implementation = "eager"
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    ids = torch.tensor([[1, 5, 9, 13, 2, 6]])
    return computed_by(config), other(ids, return_dict=True).logits


@pytest.mark.parametrize("family", SOMETHING)
@torch.no_grad()
def test_another_config_is_one_with_other_logits(family: str) -> None:
    own, logits = logits_with(family, {})
    found, same = logits_with(family, NOTHING)
    assert torch.equal(same, logits)
    assert not compare({CONFIG: own}, {CONFIG: found}).other
    assert not {*NOTHING} & own.keys()
    for name, value in SOMETHING[family].items():
        found, other = logits_with(family, {name: value})
        assert not torch.allclose(other, logits), name
        assert compare({CONFIG: own}, {CONFIG: found}).other[CONFIG][1] == {name: value}


def test_a_config_within_a_config_counts_alike() -> None:
    class Nested:
        def __init__(self, **inner: Any) -> None:
            self.inner = inner

        def to_dict(self) -> dict[str, Any]:
            return {"text_config": {"hidden_act": "silu", **self.inner}, "id2label": {}}

    assert computed_by(Nested(label2id={"a": 1}, eos_token_id=2)) == computed_by(Nested())
    assert computed_by(Nested(rms_norm_eps=0.1)) != computed_by(Nested())
