"""The stand-in counts the host's waits, and torch's debug mode sees them."""

import warnings
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from support.cuda_stand_in import Device


def on(*values: Any) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "if": lambda x: bool(x[0]),
    "all": lambda x: bool(x.all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where of one": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "write under a mask": lambda x: x.__setitem__(x > 1, x[:1]),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: torch.repeat_interleave(x, x),
    "list as an index": lambda x: x[[0, 1]],
    "index on the host": lambda x: x[torch.tensor([0])],
    "a new tensor": lambda x: torch.tensor([1], device="cuda"),
    "copy of what is not pinned": lambda x: torch.ones(1).to("cuda", non_blocking=True),
    "copy that is waited for": lambda x: torch.ones(1).pin_memory().to("cuda"),
    "copy into the device": lambda x: x.copy_(torch.tensor([1, 2])),
    "copy into the host": lambda x: torch.tensor([1, 2]).copy_(x),
    "copy into the host that is not pinned": lambda x: torch.tensor([1, 2]).copy_(x, True),
    "a single number": lambda x: x.__setitem__(0, 5),
}
QUIET: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1).float().softmax(0).argmax(),
    "zeros": lambda x: torch.zeros(3, device="cuda"),
    "arange": lambda x: torch.arange(3, device="cuda"),
    "slices": lambda x: x[1:],
    "index": lambda x: x[x - 1],
    "fill": lambda x: x.__setitem__(slice(0, 2), 5),
    "a number under a mask": lambda x: x.__setitem__(x > 1, 5),
    "gather": lambda x: x.gather(0, x - 1),
    "pinned": lambda x: torch.ones(1).pin_memory().to("cuda", non_blocking=True),
    "into pinned": lambda x: torch.empty(2, dtype=x.dtype).pin_memory().copy_(x, True),
    "to the host, later": lambda x: x.to("cpu", non_blocking=True),
    "repeats of a known size": lambda x: torch.repeat_interleave(x, x, output_size=3),
    "on the host": lambda x: torch.tensor([3]).item(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_waits(name: str, inference: bool, cuda_stand_in: Device) -> None:
    with torch.inference_mode(inference):
        x = on(1, 2)
        with cuda_stand_in.counted() as counts:
            WAITING[name](x)
        assert len(counts.waits) == 1
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            WAITING[name](x)
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            WAITING[name](x)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", QUIET)
def test_does_not_wait(name: str, inference: bool, cuda_stand_in: Device) -> None:
    with torch.inference_mode(inference):
        x = on(1, 2)
        torch.cuda.set_sync_debug_mode("error")
        with cuda_stand_in.counted() as counts:
            QUIET[name](x)
        assert counts.waits == []


def test_waits_that_were_asked_for_pass_the_debug_mode(cuda_stand_in: Device) -> None:
    torch.cuda.set_sync_debug_mode("error")
    with cuda_stand_in.counted() as counts:
        torch.cuda.synchronize()
        torch.cuda.Event().synchronize()
        torch.cuda.current_stream().synchronize()
    assert len(counts.waits) == 3


def test_counts_say_what_was_launched_and_from_where(cuda_stand_in: Device) -> None:
    x = on(1.0, 2.0)
    with cuda_stand_in.counted() as counts:
        (x[None].t() * 2).tolist()
        torch.tensor([1.0]).to("cuda")
    assert counts.launches == {"aten::mul.Tensor": 1, "copy to the host": 1, "aten::_to_copy": 1}
    assert [wait.where.split(":")[0] for wait in counts.waits] == [_here()] * 2
    assert [place.split(":")[0] for place in counts.unpinned_copies] == [_here()]


def _here() -> str:
    return "tests/infer/cuda_stand_in/test_stand_in_waits.py"


@pytest.mark.usefixtures("cuda_stand_in")
def test_a_copy_that_nobody_waits_for_is_late() -> None:
    target = torch.zeros(1).pin_memory()
    target.copy_(on(4.0), non_blocking=True)
    assert target.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert target.tolist() == [4]


def test_other_threads_see_the_device_too(cuda_stand_in: Device) -> None:
    found: list[Any] = []

    class Own(Thread):
        def run(self) -> None:
            with torch.inference_mode():
                found.append(torch.zeros(2, device="cuda").add_(1).tolist())

    with cuda_stand_in.counted() as counts:
        threads = [Own(), Thread(target=lambda: found.append(on(1, 1).tolist()))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [[1, 1], [1, 1]]
    assert len(counts.waits) == 3


def test_a_warning_is_given_once_a_wait() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.ones(1).tolist()
    assert caught == []  # nothing is installed here
