"""Processes that train together: rank, world size and a few collective operations.

All functions work in a single process too, where the collective ones do nothing.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def rank() -> int:
    """The number of this process among all, from 0, as a launcher set it."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """The number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main() -> bool:
    return rank() == 0


def start(device: torch.device) -> bool:
    """Join the process group, by gloo on CPU and nccl on GPU; returns whether it was made here."""
    if world() == 1 or dist.is_initialized():
        return False
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        with libraries_off_stdout():
            dist.init_process_group("gloo")
    return True


@contextlib.contextmanager
def libraries_off_stdout() -> Iterator[None]:
    """Sends what libraries print to stderr, in C++ too: gloo names its connections (torch 2.9)."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            kept = os.dup(1)
        except OSError:  # there is no stdout
            yield
            return
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def barrier() -> None:
    if world() > 1:
        dist.barrier()


def broadcast(tensor: Tensor, source: int) -> None:
    """In place. `tensor` must be contiguous."""
    if world() > 1 and tensor.numel():
        dist.broadcast(tensor, source)


def from_main(value: T) -> T:
    """The main process's value in all processes; it is pickled."""
    if world() == 1:
        return value
    box = [value if is_main() else None]
    dist.broadcast_object_list(box, src=0)
    return cast(T, box[0])


def gathered(value: T) -> list[T]:
    """The values of all processes, by rank; they are pickled. It returns once all have called."""
    if world() == 1:
        return [value]
    values: list[T | None] = [None] * world()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def summed(tensor: Tensor) -> Tensor:
    """The sum over all processes."""
    if world() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def any_of(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process."""
    if world() == 1:  # nothing to wait for on a device
        return flag
    return bool(summed(torch.tensor(float(flag), dtype=torch.float32, device=device)) > 0)
