"""Tensors of a checkpoint read one at a time, so that a model larger than the memory can be packed
or run layer by layer.

Names are those of the transformers model's state dict, whatever the file calls them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medusa_kit.base.families import keep_soft_cap
from medusa_kit.base.gguf_files.check import checked
from medusa_kit.base.gguf_files.dequantise import EVERYWHERE, dequantised
from medusa_kit.base.gguf_files.names import IN_CONFIG, tensor_names
from medusa_kit.base.gguf_files.tensors import StoredTensor, tensors_of
from medusa_kit.base.remembered_configs import own_config
from medusa_kit.base.text_part import WHOLE_KEY, causal_model, stored_names
from medusa_kit.errors import CheckpointError
from medusa_kit.files import parse_json
from medusa_kit.locks import building_models

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# Reads a piece of a matrix: (which rows, their numbers in float32). They may lie in the buffer that
# it is given, which has room for them. Several pieces may be read at once.
Piece = Callable[[Tensor], tuple[slice | Tensor, Tensor]]


class StoredTensors(Protocol):
    """Where a model's tensors lie."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors that are stored; tied ones are stored once."""

    def read(self, name: str) -> Tensor:
        """A copy of the whole tensor: float32 from GGUF files, else in the file's own dtype."""

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        """A copy of some rows of an embedding, whose rows are stored in their order."""

    def pieces(self, name: str, size: int) -> list[Piece]:
        """A matrix in pieces of so many numbers; one row may be more."""


class GGUFTensors:
    """The tensors of a GGUF file and its further parts. `skeleton`: the model whose names are
    wanted, on any device. `stored` has what a tensor was stored as."""

    def __init__(self, path: Path, skeleton: Any) -> None:
        """Raises CheckpointError for a file whose tensors are not those of such a model."""
        model = checked(path)
        self._processor, names_by_file = tensor_names(model, skeleton)
        self._parts: dict[str, list[StoredTensor]] = {}
        for tensor in tensors_of(model):
            if name := names_by_file.get(tensor.name):
                self._parts.setdefault(name, []).append(tensor)
            elif tensor.name not in IN_CONFIG:
                raise CheckpointError(
                    f"{path} holds the tensor {tensor.name!r}, which no part of the model "
                    f"{skeleton.config.model_type!r} takes",
                    hint="the file may be of a variant of this architecture that is not read",
                )
        self.stored = {name: parts[0] for name, parts in self._parts.items()}
        check_all_there(self.names, skeleton, path)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.stored)

    def read(self, name: str) -> Tensor:
        parts = [self.dequantised(part) for part in self.parts_of(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def parts_of(self, name: str) -> list[StoredTensor]:
        """What is joined along dimension 1 to a parameter. Several are all experts' gates and
        other projections, gates first."""
        return sorted(self._parts[name], key=lambda part: "ffn_gate_exps" not in part.name)

    def order_of_rows(self, tensor: StoredTensor) -> NDArray[np.int64] | None:
        """Where each row of a tensor, all but its last dimension, is in the model's; None where the
        converter has changed more than their order."""
        if len(tensor.info.shape) == 1:
            return None
        count = math.prod(tensor.info.shape[:-1])
        rows_R1 = np.arange(count).reshape(*tensor.info.shape[:-1], 1)
        try:
            stored_R1 = self._processed(rows_R1, tensor)
        except (ValueError, TypeError, LookupError):  # it takes whole rows
            return None
        order_R = stored_R1.ravel()
        if stored_R1.shape != rows_R1.shape or not np.array_equal(
            np.sort(order_R), rows_R1.ravel()
        ):
            return None
        return order_R.argsort()

    def dequantised(self, tensor: StoredTensor) -> Tensor:
        """A stored tensor in float32, as the model has it."""
        done = self._processed(tensor.numbers(), tensor)
        return torch.from_numpy(np.ascontiguousarray(done)).float()

    def _processed(self, numbers: NDArray[Any], tensor: StoredTensor) -> NDArray[Any]:
        """What the converter has changed is undone."""
        done = self._processor.process(
            numbers, tensor.name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        )
        weights: NDArray[Any] = done.weights
        return weights

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        chosen = rows.numpy() if isinstance(rows, Tensor) else rows
        # What transformers changes in a file's tensors is not in embeddings.
        return torch.from_numpy(self.stored[name].numbers(chosen))

    def pieces(self, name: str, size: int) -> list[Piece]:
        tensor = self.stored[name]
        rows_R = None
        if len(self._parts[name]) == 1 and tensor.info.kind in EVERYWHERE:
            rows_R = self.order_of_rows(tensor)
        if rows_R is None:
            return [lambda _: (slice(None), self.read(name))]
        order_R = torch.from_numpy(rows_R)
        raw_RB = tensor.data.reshape(len(order_R), -1).view(np.uint8)
        columns = math.prod(tensor.info.shape) // len(order_R)

        def read(rows: slice, buffer: Tensor) -> tuple[Tensor, Tensor]:
            piece = torch.from_numpy(raw_RB[rows].copy())  # a file is mapped read-only
            room = buffer[: len(piece) * columns]
            out = room.view(len(piece), columns) if columns <= len(buffer) else None
            return order_R[rows], dequantised(piece, tensor.info.kind, out)

        return [partial(read, rows) for rows in _row_slices(len(order_R), columns, size)]


class SafetensorsFolder:
    """The tensors of a folder of safetensors files, one or several with an index."""

    def __init__(self, folder: Path, skeleton: Any) -> None:
        """Raises CheckpointError for a folder whose tensors are not those of such a model."""
        self.files = safetensors_files(folder)
        opened = [_opened(file) for file in self.files]
        file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        stored_names_of = _names(folder, skeleton, file_of)
        self._sources = {
            name: (file_of[stored], stored) for name, stored in stored_names_of.items()
        }
        check_all_there(self.names, skeleton, folder)
        self._check_shapes(skeleton, folder)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._sources)

    def _check_shapes(self, skeleton: Any, folder: Path) -> None:
        for name, tensor in skeleton.state_dict().items():
            if name not in self._sources:  # tied to one that is
                continue
            file, stored = self._sources[name]
            shape = file.get_slice(stored).get_shape()
            if list(tensor.shape) != shape:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} has the shape {shape}, expected "
                    f"{list(tensor.shape)} by config.json",
                    hint="the config may be another model's",
                )

    def read(self, name: str) -> Tensor:
        return self.read_rows(name, slice(None))

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        file, stored = self._sources[name]
        rows_read: Tensor = (
            file.get_slice(stored)[rows]
            if isinstance(rows, slice)
            else file.get_tensor(stored)[rows]
        )
        return rows_read.clone()  # the file may be replaced while it is mapped

    def pieces(self, name: str, size: int) -> list[Piece]:
        file, stored = self._sources[name]
        outputs, inputs = file.get_slice(stored).get_shape()

        def read(rows: slice, _: Tensor) -> tuple[slice, Tensor]:
            return rows, self.read_rows(name, rows).float()

        return [partial(read, rows) for rows in _row_slices(outputs, inputs, size)]


def _row_slices(count: int, columns: int, size: int) -> list[slice]:
    step = max(1, size // columns)
    return [slice(first, first + step) for first in range(0, count, step)]


def _names(folder: Path, skeleton: Any, stored: Iterable[str]) -> Mapping[str, str]:
    """A tensor's name in the model -> its name in the files."""
    if not hasattr(skeleton.config, WHOLE_KEY):
        return {name: name for name in stored}
    from transformers import AutoConfig

    with building_models, _parameters_on_meta():
        return stored_names(AutoConfig.from_pretrained(folder), stored)


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}", hint="it may be cut off; copy it again"
        ) from error


def safetensors_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights. Raises CheckpointError where there are none, and for
    an index that does not name them."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise CheckpointError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}",
            hint="only safetensors can be read tensor by tensor",
        )
    try:
        file_names: Mapping[str, str] = parse_json((folder / INDEX).read_bytes())["weight_map"]
        return [folder / name for name in sorted(set(file_names.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / INDEX} is no index of safetensors files: {error!r}",
            hint="copy it again from where the model is from",
        ) from error


def check_all_there(names: frozenset[str], skeleton: Any, path: Path) -> None:
    """Raises CheckpointError where a tensor of the model is not stored, nor tied to one that is."""
    tied = set(getattr(skeleton, "all_tied_weights_keys", None) or ())
    missing = sorted(set(skeleton.state_dict()) - names - tied)
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors of the model, among them {missing[0]!r}",
            hint="the file may be of another architecture, or its tensors are stored joined",
        )


def skeleton_of(config: Any) -> Any:
    """The transformers model of a config: parameters on the meta device, without memory, and real
    buffers."""
    with building_models, _parameters_on_meta():
        model = causal_model(own_config(config))
    keep_soft_cap(model)
    return model.eval().requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Of modules that this thread makes: those of other threads are real."""
    register, own_thread = nn.Module.register_parameter, get_ident()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if get_ident() == own_thread and param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def stored_tensors(path: Path, skeleton: Any) -> StoredTensors:
    """The tensors of a GGUF file or a folder of safetensors files. Raises CheckpointError."""
    if path.suffix == ".gguf":
        return GGUFTensors(path, skeleton)
    return SafetensorsFolder(path, skeleton)
