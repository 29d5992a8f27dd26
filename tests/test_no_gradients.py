"""Functions that run in torch's inference mode, whoever calls them."""

import pytest
import torch

from medusa_kit.no_gradients import no_gradients


@no_gradients
def doubled(x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
    """Its words."""
    assert torch.is_inference_mode_enabled()
    if fails:
        raise ValueError("as asked")
    return 2 * x


def test_the_mode_is_on_inside_and_as_before_outside() -> None:
    x = torch.ones(3, requires_grad=True)
    assert doubled(x).is_inference()
    assert not torch.is_inference_mode_enabled()
    with pytest.raises(ValueError, match="as asked"):
        doubled(x, fails=True)
    assert not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        assert doubled(x).is_inference()
        assert torch.is_inference_mode_enabled()
    assert doubled.__doc__ == "Its words."
