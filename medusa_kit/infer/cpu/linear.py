"""Linear layers for a few rows in C++, for models that the C++ decoder does not know.

Shapes: X any leading shape, D in, O out.
"""

import ctypes
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_kit.base.fingerprint import version_of
from medusa_kit.base.quantization import is_plain_linear
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.gguf_blocks import equal_blocks
from medusa_kit.infer.cpu.packed.packing import Blocks, PackedMatrix, pack
from medusa_kit.infer.mkl_linear import Packing, can_be_packed, has_its_own, plain_linears


class NativeLinear(Packing):
    """nn.Linear that multiplies up to MAX_ROWS rows by packed weights. Its weights keep their names
    and identity, and are packed anew once they were written to or replaced; more rows, other dtypes
    and gradients are computed by torch, and so is what is called outside of `using_packs`.
    """

    packed: PackedMatrix
    packed_from: tuple[int, ...]  # version and address of what was packed
    loaded: ctypes.CDLL

    def forward(self, x_XD: Tensor) -> Tensor:
        rows = x_XD.shape[:-1].numel()
        grad = torch.is_grad_enabled() and (x_XD.requires_grad or self.weight.requires_grad)
        few = rows <= kernels.MAX_ROWS and self.may_use_packs() and has_its_own(self)
        if not few or grad or x_XD.dtype != torch.float32:
            return F.linear(x_XD, self.weight, self.bias)
        if self.packed_from != _marks(self):
            if not can_be_packed(self):
                return F.linear(x_XD, self.weight, self.bias)
            _pack(self)
        packed = self.packed  # another thread may pack anew meanwhile
        if x_XD.shape[-1] != packed.struct.inputs:  # the kernels check nothing
            return F.linear(x_XD, self.weight, self.bias)
        x_XD = x_XD.contiguous()
        out_XO = x_XD.new_empty(*x_XD.shape[:-1], packed.struct.outputs)
        self.loaded.mk_linear(
            ctypes.byref(packed.struct), x_XD.data_ptr(), rows, out_XO.data_ptr(),
            kernels.threads_for(rows * self.weight.numel(), packed.num_bytes),
        )  # fmt: skip
        return out_XO

    def forget_packs(self) -> None:
        self.packed_from = ()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which packs anew: pointers cannot be copied."""
        own = {name: it for name, it in self.__dict__.items() if name not in ("packed", "loaded")}
        return {**own, "packed_from": ()}


def _pack(layer: NativeLinear, blocks: Blocks | None = None) -> None:
    marks = _marks(layer)  # before, so that what is written meanwhile is packed again
    layer.packed = pack(layer.weight.detach(), layer.bias, blocks)
    layer.loaded = cast(ctypes.CDLL, kernels.load_library())  # there, since the layer is native
    layer.packed_from = marks


def _marks(layer: nn.Linear) -> tuple[int, ...]:
    weight, bias = layer.weight, layer.bias
    own = (version_of(weight), weight.data_ptr())
    return own if bias is None else (*own, version_of(bias), bias.data_ptr())


def make_native(layer: nn.Linear, blocks: Blocks | None = None) -> bool:
    """Turn a plain float32 layer on a CPU into a NativeLinear; returns whether it did."""
    loaded = kernels.load_library()
    if loaded is None or not is_plain_linear(layer) or not can_be_packed(layer):
        return False
    layer.__class__ = NativeLinear
    _pack(cast(NativeLinear, layer), blocks)
    return True


def install_native_linears(module: Any, scales: Mapping[Any, Tensor] | None = None) -> int:
    """Turn all plain float32 layers of a module into NativeLinears; returns how many.

    `scales`: scales_OQ of layers whose weights were rounded to eight bits.
    """
    known = scales or {}
    return sum(
        make_native(
            layer, equal_blocks(layer.weight.detach(), known[layer]) if layer in known else None
        )
        for layer in plain_linears(module)
    )
