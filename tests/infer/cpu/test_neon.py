"""The kernels on 64-bit ARM, cross-compiled and run by qemu: with NEON's dot products and without.

Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu and qemu-user). Nothing
is timed.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from support.kernels.compiled import ARM_FLAGS, ARM_LACKING, products_on_arm
from support.kernels.packed_weights import BLOCKS, KINDS, weights_of
from support.samples import ALL

from medusa_kit.infer.cpu.packed.packing import pack

pytestmark = pytest.mark.skipif(
    bool(ARM_LACKING), reason=f"not installed: {', '.join(ARM_LACKING)}"
)
ROWS, OUTPUTS = 21, 37
PARTS = ((ROWS, 2), *((rows, threads) for rows in (1, 2, 3, 4, 7, 8, 9) for threads in (1, 3)))


def inputs_of(kind: str) -> torch.Tensor:
    """With one number of a group far above the others, which the products must not lose."""
    x = torch.randn(ROWS, weights_of(kind).shape[1], generator=torch.Generator().manual_seed(4))
    x[:, 5] *= 1000
    return x


def write_matrices(path: Path) -> None:
    with path.open("wb") as file:
        file.write(np.array([len(KINDS)]).tobytes())
        for kind in KINDS:
            struct, x = (
                (matrix := pack(weights_of(kind), None, BLOCKS.get(kind))).struct,
                inputs_of(kind),
            )
            head = (
                struct.kind,
                struct.outputs,
                struct.inputs,
                matrix.num_bytes,
                ROWS,
                len(PARTS),
                3,
            )
            file.write(np.array(head).tobytes())
            file.write(ctypes.string_at(struct.data, matrix.num_bytes))
            file.write(x.numpy().tobytes())
            file.write(np.array(PARTS).tobytes())


# The dot products are tested in test_activations.py too.
@pytest.mark.parametrize("isa", ARM_FLAGS if ALL else ["plain"])
def test_products_on_arm(isa: str, tmp_path: Path) -> None:
    write_matrices(tmp_path / "in")
    results = products_on_arm(isa, tmp_path / "in")
    each = results.view(len(KINDS), -1)
    for kind, of_kind in zip(KINDS, each, strict=True):
        whole, *few = of_kind.split([rows * OUTPUTS for rows, _ in PARTS])
        x, weights = inputs_of(kind).double(), weights_of(kind).double()
        rounding = 2.0**-21 * (x.abs().amax(1, keepdim=True) * weights.abs().sum(1))
        error = (whole.view(ROWS, OUTPUTS).double() - x @ weights.T).abs()
        assert (error <= rounding).all(), kind
        for part in few:
            assert torch.equal(part, whole[: len(part)]), f"{kind}: bits depend on other rows"
