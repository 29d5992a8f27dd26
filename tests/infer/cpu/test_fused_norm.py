"""Norms are replaced only where every bit stays the same, and so do the model's answers."""

import pytest
import torch
from support.tiny_models import PROMISED, tiny_model

from medusa_kit.infer.cpu.fused_norm import FusedRMSNorm, install_fused_norms


@pytest.mark.parametrize("family", PROMISED)
def test_logits_stay_bit_for_bit(family: str) -> None:
    model, other = tiny_model(family), tiny_model(family)
    for one in (model, other):
        for name, parameter in one.named_parameters():
            if "norm" in name:  # untrained norms are all ones, which hides a wrong weight
                torch.manual_seed(len(name))
                parameter.data.copy_(torch.randn(parameter.shape))
    names = list(model.state_dict())
    exchanged = install_fused_norms(model)
    assert (exchanged > 0) == (family not in ("gemma3", "gpt2", "gpt_neox"))
    assert sum(isinstance(m, FusedRMSNorm) for m in model.modules()) == exchanged
    assert list(model.state_dict()) == names
    ids = torch.randint(3, 96, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


def test_a_norm_that_only_looks_like_one_is_left_alone() -> None:
    class DoublingRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * torch.nn.functional.rms_norm(x, (8,), self.weight, self.eps)

    model = torch.nn.Sequential(DoublingRMSNorm())
    assert install_fused_norms(model) == 0
    assert isinstance(model[0], DoublingRMSNorm)
