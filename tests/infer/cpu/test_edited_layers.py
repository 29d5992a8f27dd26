"""Linear layers in C++ whose weights change or are copied, where torch runs the steps."""

import copy
import pickle

import pytest
import torch
from support.small_engines import build_engine
from support.tiny_models import tiny_model
from torch import nn

from medusa_kit.base.model import wrap_model
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.linear import install_native_linears
from medusa_kit.infer.mkl_linear import forget_packs, using_packs

pytestmark = pytest.mark.skipif(kernels.load_library() is None, reason="no compiler")


@pytest.fixture(autouse=True)
def in_use():
    """Layers are called as steps call them."""
    with using_packs():
        yield


WRITES = {
    "in place": lambda layer, part: getattr(layer, part).mul_(-1.5),
    "replaced": lambda layer, part: setattr(
        layer, part, nn.Parameter(getattr(layer, part) * -1.5, requires_grad=False)
    ),
    "storage": lambda layer, part: setattr(
        getattr(layer, part), "data", getattr(layer, part).data * -1.5
    ),
    "by data": lambda layer, part: (getattr(layer, part).data.mul_(-1.5), forget_packs(layer)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_what_was_written_to_is_packed_anew(write, part):
    layer = nn.Linear(24, 40).requires_grad_(False)
    assert install_native_linears(layer) == 1
    x = torch.randn(5, 24)
    layer(x)
    WRITES[write](layer, part)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)


def test_a_model_edited_between_calls_answers_as_it_is_now():
    """Its linear layers too, where torch runs the steps."""
    model = tiny_model("olmo2")
    engine = build_engine(wrap_model(model, None, "olmo2"))
    assert "linear layers by C++" in engine.steps_run_by
    prompt = list(range(5, 40))
    answers = [engine.generate(prompt, max_new_tokens=12).token_ids]
    for edit in (lambda one: one.mul_(-8), lambda one: one.data.mul_(-0.5)):
        for name, parameter in model.named_parameters():
            if name.endswith("up_proj.weight"):
                with torch.no_grad():
                    edit(parameter)
        twin = tiny_model("olmo2")
        twin.load_state_dict(model.state_dict())
        ids = torch.tensor([prompt])
        out = twin.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        answers.append(engine.generate(prompt, max_new_tokens=12).token_ids)
        assert answers[-1] == out[0, len(prompt) :].tolist()
    assert answers[0] != answers[1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_pack_for_themselves(copied):
    layer = nn.Linear(24, 40).requires_grad_(False)
    install_native_linears(layer)
    other, x = copied(layer), torch.randn(5, 24)
    layer.weight.mul_(-1.5)
    torch.testing.assert_close(other(x), nn.functional.linear(x, other.weight, other.bias))
    assert not torch.allclose(other(x), layer(x))
