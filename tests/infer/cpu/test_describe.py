"""Models that the C++ step does not compute are not described to it, and say why."""

import pytest
from support.tiny_models import model_of, tiny_model
from torch import nn

from medusa_kit.base.model import wrap_model
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.linear import NativeLinear
from medusa_kit.infer.cpu.packed.describe import describe
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.model_parts import Unsupported
from medusa_kit.infer.runners.backends import prepare_backends

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)


def test_what_cannot_be_described_goes_through_torch():
    with pytest.raises(Unsupported, match="no description of 'gpt2'"):
        describe(tiny_model("gpt2"))
    with pytest.raises(Unsupported, match="heads of 8 numbers"):
        describe(tiny_model("llama"))
    verifier = prepare_backends(wrap_model(tiny_model("olmo2"), None, "olmo2")).verifier
    assert not isinstance(verifier, NativeVerifier)
    assert "linear layers by C++ (no description of 'olmo2')" in verifier.steps_run_by
    assert isinstance(verifier.base.model.model.layers[0].mlp.up_proj, NativeLinear)


ODD = {
    "weights are not all float32": lambda model: model.lm_head.half(),
    "its output embedding is not": lambda model: setattr(model, "lm_head", nn.ReLU()),
    "its input embedding": lambda model: setattr(model.model, "embed_tokens", nn.ReLU()),
    "layers with parts": lambda model: first_of(model).add_module("more", nn.ReLU()),
    "attention with unknown": lambda model: first_of(model).self_attn.add_module("more", nn.ReLU()),
    "an MLP with unknown parts": lambda model: first_of(model).mlp.add_module("more", nn.ReLU()),
    "a soft cap": lambda model: setattr(first_of(model).self_attn, "attn_logit_softcapping", 5.0),
    "the activation ReLU": lambda model: setattr(first_of(model).mlp, "act_fn", nn.ReLU()),
    "a norm of another kind, ReLU": lambda model: setattr(model.model, "norm", nn.ReLU()),
    "a norm of another kind, LayerNorm": lambda model: setattr(model.model, "norm", layer_norm()),
    "several epsilons": lambda model: setattr(model.model.norm, "variance_epsilon", 0.01),
}


def first_of(model):
    return model.model.layers[0]


def layer_norm():
    return nn.LayerNorm(model_of("llama").config.hidden_size)


@pytest.mark.parametrize("reason", ODD)
def test_what_c_does_not_compute_is_not_described(reason):
    model = model_of("llama")
    describe(model)
    ODD[reason](model)
    with pytest.raises(Unsupported, match=reason):
        describe(model)
