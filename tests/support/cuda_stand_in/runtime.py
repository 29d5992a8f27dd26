"""The functions of torch.cuda and torch.accelerator, by the names they have there."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from support.cuda_stand_in import graph, random_numbers, streams
from support.cuda_stand_in.state import DEVICE, Device, device, is_ours

MODES: dict[int | str, int] = {"default": 0, "warn": 1, "error": 2, 0: 0, 1: 1, 2: 2}


class OnDevice:
    """`torch.cuda.device` and `device_of`: there is only one."""

    def __init__(self, place: Any = None) -> None:
        if not isinstance(place, Tensor):
            is_ours(place)  # raises for another one

    def __enter__(self) -> "OnDevice":
        return self

    def __exit__(self, *error: object) -> None:
        return None


def synchronize(place: Any = None) -> None:
    device().wait("torch.cuda.synchronize", explicit=True)


def mem_get_info(place: Any = None) -> tuple[int, int]:
    device().check()
    return device().memory.free, device().memory.total


def allocated(place: Any = None) -> int:
    return device().memory.allocated


def get_device_properties(place: Any = None) -> SimpleNamespace:
    is_ours(place)
    major, minor = Device.capability
    return SimpleNamespace(
        name=Device.name, major=major, minor=minor, total_memory=device().memory.total,
        multi_processor_count=Device.cores, warp_size=32,
    )  # fmt: skip


def set_sync_debug_mode(mode: int | str) -> None:
    device().debug_mode = MODES[mode]


def set_device(place: Any) -> None:
    is_ours(place)


def empty_cache() -> None:
    device().check()


def manual_seed(seed: int) -> None:
    random_numbers.default.manual_seed(int(seed))


def get_rng_state(place: Any = "cuda") -> Tensor:
    return random_numbers.default.get_state()


def set_rng_state(state: Tensor, place: Any = "cuda") -> None:
    random_numbers.default.set_state(state)


def set_rng_state_all(states: list[Tensor]) -> None:
    set_rng_state(states[0])


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return including_emulation


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextmanager
def no_range(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


CUDA: dict[str, Any] = {
    "_lazy_init": nothing,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": set_device,
    "device": OnDevice,
    "device_of": OnDevice,
    "get_device_name": lambda place=None: Device.name,
    "get_device_capability": lambda place=None: Device.capability,
    "get_device_properties": get_device_properties,
    "is_bf16_supported": is_bf16_supported,
    "synchronize": synchronize,
    "set_sync_debug_mode": set_sync_debug_mode,
    "get_sync_debug_mode": lambda: device().debug_mode,
    "mem_get_info": mem_get_info,
    "memory_allocated": allocated,
    "memory_reserved": allocated,
    "max_memory_allocated": allocated,
    "max_memory_reserved": allocated,
    "reset_peak_memory_stats": nothing,
    "empty_cache": empty_cache,
    "set_per_process_memory_fraction": nothing,
    "ipc_collect": nothing,
    "Stream": streams.Stream,
    "Event": streams.Event,
    "stream": streams.stream,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
    "CUDAGraph": graph.CUDAGraph,
    "graph_pool_handle": graph.graph_pool_handle,
    "is_current_stream_capturing": lambda: device().capture() is not None,
    "default_generators": (random_numbers.default,),
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed,
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "get_rng_state_all": lambda: [get_rng_state()],
    "set_rng_state_all": set_rng_state_all,
    "initial_seed": random_numbers.default.initial_seed,
    "nvtx": SimpleNamespace(range_push=nothing, range_pop=nothing, mark=nothing, range=no_range),
}
ACCELERATOR: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_accelerator": lambda check_available=False: torch.device(DEVICE.type),
    "current_device_index": lambda: 0,
    "set_device_index": set_device,
    "current_stream": streams.current_stream,
    "synchronize": synchronize,
    "empty_cache": empty_cache,
    "get_memory_info": mem_get_info,
    "memory_allocated": allocated,
    "max_memory_allocated": allocated,
}
HIDDEN: dict[str, Any] = {  # of torch._C
    "_cuda_endAllocateToPool": nothing,
    "_cuda_beginAllocateToPool": nothing,
    "_host_emptyCache": nothing,
}
