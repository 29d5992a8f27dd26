"""The check at load finds what is wrong in a packed matrix, whichever it is."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")
from support.gguf.quantised_files import quantised

from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.model import PackedMatrix
from medusa_kit.infer.cpu.packed_base import PackedBase, base_for_decoding
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.self_check import TreeCheck, check_trees

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)
KINDS = ("Q4_K", "Q6_K", "Q8_0")
MATRICES = [f"layers.{i}.{part}" for i in (0, 1) for part in ("qkv", "out", "gate_up", "down")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("wrong-packs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDUSA_KIT_CACHE", str(root / "cache"))
        yield quantised(root / "model.gguf", "llama", KINDS)


@pytest.fixture
def base(path: Path) -> PackedBase:
    base = base_for_decoding(str(path), check=True)
    assert isinstance(base, PackedBase)
    return base


def check(base: PackedBase) -> TreeCheck:
    return check_trees(NativeVerifier(base, base.decoder), base.reference)


def test_a_right_pack_passes(base: PackedBase) -> None:
    assert check(base).relative_error < 1e-4


def two_panels_exchanged(data: torch.Tensor) -> None:
    data[[0, 1]] = data[[1, 0]]


def rows_left_out(data: torch.Tensor) -> None:
    data[0] = 0


FAULTS = (two_panels_exchanged, rows_left_out)


@pytest.mark.parametrize("name", [*MATRICES, "output"])
@pytest.mark.parametrize("put", FAULTS, ids=lambda put: put.__name__)
def test_a_wrong_matrix_is_found(
    name: str, put: Callable[[torch.Tensor], None], base: PackedBase
) -> None:
    matrix = base.packed.matrices[name]
    data = matrix.data.clone()  # the file is mapped
    put(data)
    assert not torch.equal(data, matrix.data)
    struct = matrix.struct
    wrong = PackedMatrix.of(struct.kind, struct.outputs, struct.inputs, data, matrix.bias)
    base.packed.matrices[name] = wrong
    if name == "output":
        base.packed.output = wrong
    else:
        _, layer, part = name.split(".")
        base.packed.layers[int(layer)][part] = wrong
    with pytest.raises(IncompatibleBaseError, match="off by"):
        check(base)
