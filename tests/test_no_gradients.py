"""Functions that run in torch's inference mode, whoever calls them."""

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

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


@no_gradients
def nested() -> torch.Tensor:
    return doubled(torch.ones(3))


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """What is raised in its callbacks (torch has one) is not raised in the code it interrupts."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_ctrl_c_at_any_line_leaves_the_mode_as_it_was() -> None:
    """A trace function raises where a signal could, one line further on each time."""

    def interrupted(line: int) -> BaseException | None:
        passed = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == line:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            nested()
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.settrace(before)
        return None

    line = 1
    while (error := interrupted(line)) is not None:
        assert not torch.is_inference_mode_enabled()
        del error  # frees the traceback, and what it holds
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        line += 1
    assert line > 5
