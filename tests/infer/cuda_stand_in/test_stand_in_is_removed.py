"""Nothing of the stand-in is left behind."""

import sys
import threading
from typing import Any

import pytest
import torch
from support import cuda_stand_in
from support.attention_inputs import inputs_of
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PLACES = [torch, torch.cuda, torch.cuda.graphs, torch.cuda.graph, torch.accelerator, torch._C,
          torch.Tensor, torch.nn.functional, threading.Thread]  # fmt: skip


def everything() -> list[dict[str, Any]]:
    return [dict(vars(place)) for place in PLACES]


def test_all_is_as_it_was() -> None:
    before, random = everything(), torch.get_rng_state()
    with cuda_stand_in.installed():
        assert everything() != before
        assert torch.cuda.is_available()
        torch.rand(3, device="cuda").tolist()
    assert everything() == before
    assert _get_current_dispatch_mode_stack() == []
    assert not torch.__future__.get_swap_module_params_on_conversion()
    assert torch.equal(torch.get_rng_state(), random)


def test_also_after_an_error() -> None:
    before = everything()
    with pytest.raises(ZeroDivisionError), cuda_stand_in.installed():
        raise ZeroDivisionError
    assert everything() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a device of its own")
def test_there_is_no_device_afterwards() -> None:
    with cuda_stand_in.installed():
        left = torch.ones(2, device="cuda")
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda"):
        torch.zeros(2, device="cuda")
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda"):
        torch.zeros(2).to("cuda")
    assert left.tolist() == [1, 1]  # what somebody still holds is no trap


def test_each_one_counts_for_itself() -> None:
    with cuda_stand_in.installed() as first:
        torch.ones(1, device="cuda").tolist()
    with cuda_stand_in.installed() as second:
        second.fail_for_good()
    with cuda_stand_in.installed() as third:
        torch.ones(1, device="cuda").tolist()
    assert [len(one.counts.waits) for one in (first, second, third)] == [1, 0, 1]


def test_caches_of_the_product_hold_no_tensor_of_it() -> None:
    from medusa_kit.infer.attention.step import TreeStep

    with cuda_stand_in.installed():
        TreeStep([3], *inputs_of([(-1, 0, 0)], torch.device("cuda", 0)))
    kept = [
        name
        for module in list(sys.modules)
        if module.startswith("medusa_kit.") and not module.startswith("medusa_kit.infer.cpu")
        for name, value in vars(sys.modules[module]).items()
        if hasattr(value, "cache_info") and value.cache_info().currsize
    ]
    assert kept == []
