"""Linear layers for a few rows at a time on CPU.

A verify step multiplies N rows, where plain fp32 products waste memory bandwidth. On two AVX-512
cores all products of SmolLM2-135M take 35 ms at 1 row, 65 at 4 and 84 at 8; with weights packed by
MKL for that row count they take 31 at 4 and 35 at 8. Any module with a `weight` and a `forward` can
take the layers' place; this one needs no compiler.

Shapes: X rows, D in, O out.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_kit import console
from medusa_kit.base.fingerprint import version_of
from medusa_kit.base.quantization import is_plain_linear

PACKED_ROWS = range(2, 65)  # one row is a matrix-vector product, which plain torch does well
KEPT_PACKS = 2  # so that two trees in turn (a benchmark, a comparison) do not repack every time
# Of the free memory, the most that one copy of the weights may take. MKL has copies for two numbers
# of rows, and more while they are made; the kernels have one.
SHARE_OF_MEMORY, SHARE_OF_KERNELS = 0.2, 0.5


class _Use(threading.local):
    """How many contexts of `using_packs` this thread is in."""

    depth = 0


_use = _Use()


@contextmanager
def using_packs() -> Iterator[None]:
    """Within this context layers multiply by packed weights. Whoever enters it has looked whether
    they are still those of the model (infer/renewal.py). Everywhere else layers compute with the
    weights that they have: others may call them between two answers."""
    _use.depth += 1
    try:
        yield
    finally:
        _use.depth -= 1


class Pack(NamedTuple):
    """A packed weight, and what it was packed from: a weight may be written to or replaced. Writes
    through `weight.data` leave no mark (`forget_packs`)."""

    packed: Tensor
    version: int
    address: int
    inputs: int

    def is_of(self, weight: Tensor) -> bool:
        return self.version == version_of(weight) and self.address == weight.data_ptr()

    def takes(self, x_XD: Tensor) -> bool:
        """Whether this pack multiplies `x_XD`: MKL checks nothing."""
        return x_XD.shape[-1] == self.inputs and x_XD.dtype == torch.float32


class Packing(nn.Linear):
    """nn.Linear that also keeps its weight packed, for use within `using_packs`."""

    stands_for = nn.Linear

    @staticmethod
    def may_use_packs() -> bool:
        """Code that torch compiles keeps what it finds, and is run outside of answers too."""
        return not torch.compiler.is_compiling() and _use.depth > 0

    def forget_packs(self) -> None:
        """Pack anew at the next forward."""
        raise NotImplementedError


def can_be_packed(layer: nn.Linear) -> bool:
    """Whether kernels for float32 on a CPU take the weight and bias of this layer."""
    weight, bias = layer.weight, layer.bias
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return False
    parts = [weight] if bias is None else [weight, bias]
    return all(one.dtype == torch.float32 and one.device.type == "cpu" for one in parts)


def has_its_own(layer: nn.Linear) -> bool:
    """Whether weight and bias are the layer's parameters. A parametrization or a hook (pruning)
    computes them anew for each forward, often in the memory of the last ones."""
    return "weight" in layer._parameters and "bias" in layer._parameters


class PackedLinear(Packing):
    """nn.Linear whose weight is also kept packed, for the row counts last asked for.

    Packs are for steps, which are in inference mode: they have no gradients, and what others do
    with the model is left to torch.
    """

    # Row count -> packed weight, made at first use. The dict is replaced, never changed, since a
    # forward in another thread may be reading it.
    packs: dict[int, Pack | None]
    _multiply: Any  # torch.ops.mkl._mkl_linear

    def forward(self, x_XD: Tensor) -> Tensor:
        # A step calls this hundreds of times, so the usual case comes first and does little.
        rows = x_XD.shape[:-1].numel()
        pack = self.packs.get(rows)
        usable = _use.depth > 0 and torch.is_inference_mode_enabled() and has_its_own(self)
        if pack is not None and usable and pack.is_of(self.weight) and pack.takes(x_XD):
            return self._multiply(x_XD, pack.packed, self.weight, self.bias, rows)
        return self._slow_path(x_XD, rows)

    def _slow_path(self, x_XD: Tensor, rows: int) -> Tensor:
        """Packs first, uses the pack of a larger row count, or multiplies without one."""
        packs = self.packs
        packable = rows > 1 and torch.is_inference_mode_enabled() and _use.depth > 0
        packable = packable and has_its_own(self) and can_be_packed(self)
        size = _packed_rows(packs, rows) if packable else None
        if size is None:
            return F.linear(x_XD, self.weight, self.bias)
        pack = packs[size]
        if pack is None or not pack.is_of(self.weight):
            version, address = version_of(self.weight), self.weight.data_ptr()
            packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weight.detach(), size)
            pack = Pack(packed, version, address, self.weight.shape[1])
            self.packs = {**packs, size: pack}
        if not pack.takes(x_XD):
            return F.linear(x_XD, self.weight, self.bias)
        flat = F.pad(x_XD.reshape(rows, pack.inputs), (0, 0, 0, size - rows))
        out = self._multiply(flat, pack.packed, self.weight, self.bias, size)
        return out[:rows].view(*x_XD.shape[:-1], out.shape[-1])

    def forget_packs(self) -> None:
        self.packs = dict.fromkeys(self.packs)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which packs anew: packed weights cannot be copied."""
        return {**self.__dict__, "packs": dict.fromkeys(self.packs)}


def _packed_rows(packs: Iterable[int], rows: int) -> int | None:
    """The row count whose pack to use: a larger one will do, since rows of a batch finish."""
    fitting = [packed for packed in packs if rows <= packed <= 2 * rows]
    return min(fitting, default=None) if rows in PACKED_ROWS else None


def install_packed_linears(model: Any) -> bool:
    """Let the model's Linear layers pack themselves; returns whether any does.

    Only plain fp32 layers on a CPU whose torch has MKL; quantised ones are left alone. Weights keep
    their names and identity.
    """
    layers = plain_linears(model)
    if not layers or not _supported(layers[0].weight):
        return False
    for layer in layers:
        if can_be_packed(layer):
            layer.__class__ = PackedLinear
            packing = cast(PackedLinear, layer)
            packing.packs = {}
            packing._multiply = torch.ops.mkl._mkl_linear.default
    return True


def plain_linears(model: Any) -> list[nn.Linear]:
    """The layers that may be replaced; quantised ones are not among them."""
    return [module for module in model.modules() if is_plain_linear(module)]


def fits_in_memory(model: Any, share: float = SHARE_OF_MEMORY) -> bool:
    """Whether a copy of the linear layers takes no more than this share of the free memory; prints
    a note where it would."""
    size = sum(layer.weight.numel() for layer in plain_linears(model)) * 4
    if size > share * free_memory():
        console.note(
            f"linear layers stay unpacked: a packed copy of {size / 1e9:.1f} GB is more than the "
            "free memory safely allows"
        )
        return False
    return True


def pack_for_rows(modules: Iterable[Any], rows: int) -> None:
    """Pack what can be packed of a model's modules for `rows` rows from now on, at the next forward
    of that many.

    A count outside PACKED_ROWS changes nothing: such forwards run unpacked. Beyond KEPT_PACKS the
    oldest count is forgotten.
    """
    if rows not in PACKED_ROWS:
        return
    for layer in modules:
        if isinstance(layer, PackedLinear) and rows not in layer.packs:
            newest = list(layer.packs.items())[1 - KEPT_PACKS :]
            layer.packs = {**dict(newest), rows: None}


def forget_packs(model: Any) -> None:
    """The weights have become others, so they are packed anew at the next forward."""
    for layer in model.modules():
        if isinstance(layer, Packing):
            layer.forget_packs()


def free_memory() -> int:
    """Bytes of memory that can be taken without swapping."""
    import psutil  # needed on a CPU only

    return int(psutil.virtual_memory().available)


def _supported(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkl, "_mkl_linear")
    )
