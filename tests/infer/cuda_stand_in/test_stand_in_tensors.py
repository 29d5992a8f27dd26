"""Tensors of the stand-in say what CUDA's say, and fail where CUDA's fail."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cuda_stand_in import Device
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("cuda_stand_in")
CUDA = torch.device("cuda", 0)


def on(*values: Any) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


@pytest.mark.parametrize("make", [
    lambda: torch.zeros(2, device="cuda"),
    lambda: torch.tensor([1, 2], device="cuda:0"),
    lambda: torch.as_tensor([1, 2], device=CUDA),
    lambda: torch.arange(2).to("cuda"),
    lambda: torch.arange(2).to(CUDA, torch.float32),
    lambda: torch.arange(2).to(on(1.0)),
    lambda: torch.arange(2).cuda(),
    lambda: on(1, 2).float(),
    lambda: on(1, 2).to(torch.float64),
    lambda: on(1, 2).new_zeros(3),
    lambda: on(1, 2).new_tensor([1]),
    lambda: torch.zeros_like(on(1, 2)),
    lambda: on(1, 2)[1:],
    lambda: F.one_hot(on(1, 2), 4),
    lambda: copy.deepcopy(on(1, 2)),
    lambda: nn.Linear(2, 2, device="cuda").weight,
    lambda: nn.Linear(2, 2).to("cuda").bias,
])  # fmt: skip
@pytest.mark.parametrize("inference", [False, True])
def test_made_on_the_device(make: Callable[[], torch.Tensor], inference: bool) -> None:
    with torch.inference_mode(inference):
        made = make()
        assert made.device == CUDA
        assert made.is_cuda
        assert not made.is_cpu
        assert not made.is_meta
        assert (made + 1).device == CUDA
        back = made.cpu()
        assert back.device.type == "cpu"
        assert type(back) is torch.Tensor


def test_the_same_where_nothing_is_to_be_done() -> None:
    values = on(1, 2)
    assert values.to("cuda") is values
    assert values.to("cuda", torch.int64) is values
    assert values.to("cuda", copy=True) is not values


def test_a_module_keeps_its_parameters_and_their_ties() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    before = module[0].weight
    module.to("cuda")
    assert module[0].weight is module[1].weight is before
    assert isinstance(before, nn.Parameter)
    assert before.device == CUDA
    assert before.requires_grad


MIXED: dict[str, Callable[[], Any]] = {
    "add": lambda: on(1.0, 2.0) + torch.ones(2),
    "host by number of the device": lambda: torch.ones(2) + on(1.0)[0],
    "write to the host": lambda: torch.ones(2).add_(on(1.0, 2.0)),
    "cat": lambda: torch.cat([on(1.0), torch.ones(1)]),
    "linear": lambda: F.linear(on(1.0, 2.0), torch.ones(2, 2)),
    "embedding": lambda: F.embedding(torch.tensor([0]), on(1.0, 2.0)[None]),
    "gather": lambda: on(1.0, 2.0).gather(0, torch.tensor([0])),
    "index_select": lambda: on(1.0, 2.0).index_select(0, torch.tensor([0])),
    "where": lambda: torch.where(torch.tensor([True, False]), on(1, 2), 0),
    "index of the device into the host": lambda: torch.ones(2)[on(1)],
    "value of the host": lambda: on(1, 2).index_put_((on(0, 1),), torch.tensor([3, 4])),
    "value of the device": lambda: torch.ones(2).index_put_((torch.tensor([0]),), on(3.0)),
    "attention": lambda: F.scaled_dot_product_attention(
        *[torch.ones(1, 1, 2, 4, device="cuda")] * 2, torch.ones(1, 1, 2, 4)
    ),
    "out": lambda: torch.add(on(1, 2), on(1, 2), out=torch.zeros(2, dtype=torch.int64)),
    "generator of the host": lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_mixing_devices_fails(name: str, inference: bool) -> None:
    with (
        torch.inference_mode(inference),
        pytest.raises(RuntimeError, match=r"same device|Expected a 'cuda' device"),
    ):
        MIXED[name]()


def test_a_number_of_the_host_may_take_part() -> None:
    number = torch.tensor(2.0)
    assert (on(1.0, 2.0) * number).tolist() == [2, 4]
    assert torch.where(on(True, False), on(1.0, 2.0), number).tolist() == [1, 2]
    assert on(1.0, 2.0).masked_fill(on(True, False), number).tolist() == [2, 2]


def test_values_are_read_through_a_copy_only() -> None:
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        on(1).numpy()
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        memoryview(on(1).__array__())
    assert on(1, 2).cpu().numpy().tolist() == on(1, 2).tolist() == [1, 2]
    assert f"{on(1.25)[0]:.1f}" == "1.2"


def test_memory_of_the_device_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch\.cuda"):
        on(1).pin_memory()
    assert not on(1).is_pinned()
    assert torch.ones(2).pin_memory().is_pinned()
    assert torch.ones(2).pin_memory()[1:].is_pinned()
    assert torch.empty(2, pin_memory=True).is_pinned()
    assert not torch.ones(2).is_pinned()


def test_another_device_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2).to("cuda:1")
    assert torch.cuda.device_count() == 1


def test_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    torch.save({"a": on(1, 2)}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", map_location="cpu")["a"].device.type == "cpu"
    there = torch.load(tmp_path / "a.pt")["a"]
    assert there.device == CUDA
    assert there.tolist() == [1, 2]
    save_file({"a": on(1, 2)}, tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors")["a"].device.type == "cpu"
    loaded = load_file(tmp_path / "a.safetensors", device="cuda")["a"]
    assert (loaded.device, loaded.tolist()) == (CUDA, [1, 2])


def test_gradients_are_those_of_the_host() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 5))
    twin = copy.deepcopy(model).to("cuda")
    ids = torch.tensor([[1, 4, 2]])
    for one, at in ((model, "cpu"), (twin, "cuda")):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(one(ids.to(at))[0], torch.tensor([4, 2, 0]).to(at)).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
    for here, there in zip(model.parameters(), twin.parameters(), strict=True):
        assert there.grad is not None
        assert there.grad.is_cuda
        torch.testing.assert_close(there.detach().cpu(), here.detach())


def test_random_numbers_are_the_devices_own() -> None:
    torch.manual_seed(3)
    first = torch.rand(2, device="cuda").tolist()
    expected = torch.rand(2).tolist()  # of the host, which the device left alone
    torch.manual_seed(3)
    assert torch.rand(2).tolist() == expected
    assert torch.rand(2, device="cuda").tolist() == first
    generator = torch.Generator("cuda").manual_seed(5)
    assert isinstance(generator, torch.Generator)
    assert torch.rand(2, device="cuda", generator=generator).device == CUDA


def test_the_test_says_how_much_memory_there_is(cuda_stand_in: Device) -> None:
    cuda_stand_in.memory.free, cuda_stand_in.memory.total = 1000, 4000
    assert torch.cuda.mem_get_info(CUDA) == (1000, 4000)
    assert torch.cuda.get_device_properties(CUDA).total_memory == 4000
    cuda_stand_in.memory.largest = 1000
    torch.zeros(250, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="1004 bytes"):
        torch.zeros(251, device="cuda")


def test_a_lost_device_does_nothing_more(cuda_stand_in: Device) -> None:
    values = on(1, 2)
    cuda_stand_in.fail_for_good()
    for work in (
        lambda: values + 1,
        lambda: torch.zeros(1, device="cuda"),
        values.tolist,
        torch.cuda.synchronize,
        torch.accelerator.synchronize,
        torch.cuda.mem_get_info,
        torch.cuda.Event().record,
        torch.cuda.empty_cache,
    ):
        with pytest.raises(torch.AcceleratorError, match="an illegal memory access"):
            work()
    assert (torch.ones(1) + 1).tolist() == [2]


def test_whole_numbers_are_counted_as_such() -> None:
    """By which experts count their tokens; the host counts floats only."""
    counted = torch.histc(on(2, 0, 2, 1).int(), bins=3, min=0, max=2)
    assert counted.dtype == torch.int32
    assert counted.tolist() == [1, 1, 2]
