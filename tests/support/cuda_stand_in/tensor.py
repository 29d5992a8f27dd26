"""A tensor that says it is on the device and holds its data on the host."""

from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_device_tensor_from_cpu_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.cuda_stand_in.state import DEVICE, INSIDE, is_ours

TO_NUMPY = (
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
    "memory first."
)
aten = torch.ops.aten


class DeviceTensor(Tensor):
    """`held` is the data. What only Python can say of a CUDA tensor is said here; all that computes
    goes through `operations.run`."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        assert not isinstance(held, DeviceTensor)
        # In inference mode too, a view of an ordinary tensor is an ordinary one.
        with torch._C._InferenceMode(held.is_inference()):
            made = Tensor._make_wrapper_subclass(
                cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
                dtype=held.dtype, layout=held.layout, device=INSIDE,
            )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reached only in a thread that is older than the stand-in."""
        with DispatchMode():
            return func(*args, **(kwargs or {}))

    # What it says of itself.

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def get_device(self) -> int:
        return 0

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError(
            f"cannot pin '{self.held.type().replace('torch.', 'torch.cuda.')}' "
            "only dense CPU tensors can be pinned"
        )

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self.held._version

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.held!r} on {DEVICE}"

    # What reads its values, by way of a copy that waits.

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(TO_NUMPY)
        return self.detach().cpu().numpy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(TO_NUMPY)

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if self.dim() == 0 else super().__format__(form)

    def __reduce_ex__(self, protocol: Any) -> Any:
        there = self.detach().cpu()
        return _rebuild_device_tensor_from_cpu_tensor, (
            there, self.dtype, str(DEVICE), self.requires_grad,
        )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
            copied.__dict__.update({k: v for k, v in self.__dict__.items() if k != "held"})
            memo[id(self)] = copied
        return memo[id(self)]

    # What C++ would do by itself on a CUDA tensor.

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        assert isinstance(new, DeviceTensor)
        self.held = new.held

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, **more: Any
    ) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or DEVICE, **more)

    def __getitem__(self, index: Any) -> Any:
        return Tensor.__getitem__(self, _sent(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, int | float):  # stays on the host, as with CUDA
            value = torch.tensor(value, dtype=self.dtype)
        Tensor.__setitem__(self, _sent(index), value)


def _sent(index: Any) -> Any:
    """Lists as indices are copied to the device first."""
    if isinstance(index, tuple):
        return tuple(_sent(part) for part in index)
    if not isinstance(index, list | range) or not all(isinstance(i, int) for i in index):
        return index
    return torch.tensor(list(index), dtype=None if index else torch.long, device=DEVICE)


class DispatchMode(TorchDispatchMode):
    """Sends every operation of a thread to `operations.run`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from support.cuda_stand_in.operations import run

        return run(self, func, args, kwargs or {})


def moved(self: Tensor, place: Any, dtype: Any, **how: Any) -> Tensor:
    """`self` in another dtype or at another place, one of the two being the device."""
    here = isinstance(self, DeviceTensor)
    there = here if place is None else is_ours(place)
    same = here == there and dtype in (None, self.dtype) and how.get("memory_format") is None
    if same and not how.pop("copy", False):
        return self
    how.pop("copy", None)
    target = DEVICE if there else torch.device("cpu")
    with DispatchMode():
        return aten._to_copy(self, dtype=dtype, device=target, **how)
