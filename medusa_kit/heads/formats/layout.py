"""From tensor names to heads: what all formats share.

Nothing is guessed: an unknown name, a gap in the numbering, or a shape or dtype that does not fit
is an error that names the tensor.

Shapes: D hidden, R rows of a vocabulary matrix.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from medusa_kit.errors import CheckpointError
from medusa_kit.heads.formats.files import TensorFiles
from medusa_kit.heads.formats.neutral import Block

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCALES = ("_scale", "_scaling_factor", "_scale_inv")  # of FP8 and other quantised weights
UNMERGED = "modules_to_save"


@dataclass(frozen=True)
class Layout:
    """How a format names things.

    block    groups head, block and kind (weight or bias)
    matrix   group head, and index where the matrix is numbered after the blocks
    own      whether a name belongs to the heads; the others are the base's or the adapter's
    """

    block: re.Pattern[str]
    matrix: re.Pattern[str]
    own: Callable[[str], bool] = lambda name: True

    def marks(self, name: str) -> bool:
        return bool(self.block.fullmatch(name) or self.matrix.fullmatch(name))


@dataclass
class Names:
    """The names of a checkpoint, sorted by what they are."""

    blocks: dict[tuple[int, int, str], str] = field(default_factory=dict)
    matrices: dict[int, str] = field(default_factory=dict)
    num_heads: int = 0
    num_blocks: int = 0


def dotted(prefix: str = "") -> Layout:
    """`{prefix}{i}.{j}.linear.weight`, `.bias` and `{prefix}{i}.{L}.weight`."""
    start = re.escape(prefix) + r"(?P<head>\d+)\."
    return Layout(
        re.compile(start + r"(?P<block>\d+)\.linear\.(?P<kind>weight|bias)"),
        re.compile(start + r"(?P<index>\d+)\.weight"),
        lambda name: name.startswith(prefix),
    )


def sort_names(layout: Layout, names: Iterable[str], extras: frozenset[str]) -> Names:
    """The heads' names among those of a checkpoint. Raises CheckpointError for a name that is
    neither theirs nor an allowed extra."""
    sorted_names, indexes = Names(), {}
    for name in names:
        if name in extras or not layout.own(name):
            continue
        if block := layout.block.fullmatch(name):
            head, number = int(block["head"]), int(block["block"])
            _add(sorted_names.blocks, (head, number, block["kind"]), name)
        elif matrix := layout.matrix.fullmatch(name):
            _add(sorted_names.matrices, int(matrix["head"]), name)
            if "index" in layout.matrix.groupindex:
                indexes[name] = int(matrix["index"])
        else:
            raise unexpected(name)
    heads = {head for head, _, _ in sorted_names.blocks} | set(sorted_names.matrices)
    last, num_tensors = max(heads), len(sorted_names.blocks) + len(sorted_names.matrices)
    if last > num_tensors:  # before anything is made for each of them
        raise CheckpointError(
            f"the tensors' names count {last + 1} heads, more than there are tensors "
            f"({num_tensors})"
        )
    sorted_names.num_heads = last + 1
    sorted_names.num_blocks = max((block for _, block, _ in sorted_names.blocks), default=-1) + 1
    for name, index in indexes.items():
        if index != sorted_names.num_blocks:
            raise CheckpointError(
                f"{name} is unexpected: after {sorted_names.num_blocks} blocks a head's vocabulary "
                f"matrix has the number {sorted_names.num_blocks}"
            )
    return sorted_names


def _add(named: dict[Any, str], key: object, name: str) -> None:
    if key in named:
        raise CheckpointError(f"{name} and {named[key]} are the same tensor of a head")
    named[key] = name


def unexpected(name: str) -> CheckpointError:
    """The error for a tensor that belongs to no format."""
    if name.endswith(SCALES):
        return CheckpointError(
            f"{name} is a scale of quantised weights, which cannot be read",
            hint="convert the heads from the checkpoint before it was quantised",
        )
    if UNMERGED in name:
        return CheckpointError(
            f"{name} is part of an adapter that has not been merged",
            hint="merge the training run's adapter into its base first",
        )
    return CheckpointError(
        f"{name} is unexpected: no Medusa checkpoint has such a tensor here",
        hint="no tensor is dropped silently; remove it from the file if it does not matter",
    )


def read_blocks(files: TensorFiles, names: Names, bias: bool = True) -> list[list[Block]]:
    """All blocks, with shapes checked. Without `bias` theirs are zeros.

    Raises CheckpointError for a tensor that is missing or of a wrong shape.
    """
    blocks: list[list[Block]] = []
    for head in range(names.num_heads):
        blocks.append([])
        for number in range(names.num_blocks):
            weight_DD = read_float(files, _named(names.blocks, (head, number, "weight")))
            first = blocks[0][0].weight_DD if blocks[0] else weight_DD
            D = first.shape[0] if first.dim() else 1
            _check_shape(names.blocks[head, number, "weight"], weight_DD, (D, D))
            if bias:
                name = _named(names.blocks, (head, number, "bias"))
                bias_D = read_float(files, name)
                _check_shape(name, bias_D, (D,))
            else:
                bias_D = weight_DD.new_zeros(D)
            blocks[-1].append(Block(weight_DD, bias_D))
    return blocks


def read_matrices(
    files: TensorFiles, names: Names, blocks: list[list[Block]]
) -> list[Tensor] | None:
    """A matrix for each head, with shapes checked; None where no head has one."""
    if not names.matrices:
        return None
    matrices: list[Tensor] = []
    for head in range(names.num_heads):
        if head not in names.matrices:
            raise CheckpointError(
                f"head {head} has no vocabulary matrix, but there is "
                f"{sorted(names.matrices.values())[0]}"
            )
        matrix_RD = read_float(files, names.matrices[head])
        like = blocks[0][0].weight_DD if blocks[0] else matrix_RD
        rows = (matrices or [matrix_RD])[0].shape[:1] or (1,)
        _check_shape(names.matrices[head], matrix_RD, (*rows, *like.shape[1:]))
        matrices.append(matrix_RD)
    return matrices


def read_float(files: TensorFiles, name: str) -> Tensor:
    tensor = files.get(name)
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{name} is stored as {tensor.dtype}; heads are read in float16, bfloat16, float32 or "
            "float64",
            hint="convert the heads from the checkpoint before it was quantised",
        )
    return tensor


def _named(names: dict[tuple[int, int, str], str], key: tuple[int, int, str]) -> str:
    if key not in names:
        head, number, kind = key
        raise CheckpointError(
            f"block {number} of head {head} has no {kind}",
            hint="the checkpoint is incomplete: copy it again",
        )
    return names[key]


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    shape = tuple(tensor.shape)
    if shape == expected:
        return
    wide = len(shape) == 2 and shape[0] == expected[0] and shape[1] > shape[0] == expected[1]
    raise CheckpointError(
        f"{name} has shape {shape}, expected {expected}",
        hint="a first block that reads more than the hidden state belongs to a Hydra head, which "
        "cannot be read as a Medusa head"
        if wide
        else None,
    )
