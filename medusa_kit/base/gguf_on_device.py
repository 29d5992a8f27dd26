"""GGUF models on a device: the file's blocks travel, tensor by tensor, and are dequantised there to
the dtype that the model is to have. Nothing is written to the disk but config and tokenizer.

Shapes: R rows of a tensor (all but its last dimension), C columns.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base import families
from medusa_kit.base.files import generation_config_of
from medusa_kit.base.gguf import explained
from medusa_kit.base.gguf_files import architectures
from medusa_kit.base.gguf_files.check import ARCHITECTURE, checked
from medusa_kit.base.gguf_files.dequantise import EVERYWHERE, dequantised
from medusa_kit.base.gguf_files.tensors import StoredTensor
from medusa_kit.base.remembered_configs import read_config
from medusa_kit.base.stored_tensors import GGUFTensors, skeleton_of
from medusa_kit.transfer import to_device

PIECE = 1 << 24  # numbers that are dequantised at a time, which takes several times their memory


def loads_there(gguf: Path) -> bool:
    """Whether the kit reads the tensors of this file itself. Raises CheckpointError."""
    return checked(gguf).values[ARCHITECTURE] not in architectures.UNTESTED


def model_on(gguf: Path, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of a GGUF file, whose config lies in `folder`. Raises CheckpointError,
    IncompatibleBaseError."""
    console.stage(f"dequantising {gguf.name} on {device}")
    config = read_config(str(folder))
    families.refuse_impossible(config, str(folder))
    config.dtype = dtype
    with explained(gguf):
        model = skeleton_of(config)
        stored = GGUFTensors(gguf, model)
        state = {name: _tensor_on(stored, name, dtype, device) for name in stored.names}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.generation_config = generation_config_of(folder, config)
    return model.requires_grad_(True)


def _tensor_on(stored: GGUFTensors, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    parts = [_part_on(stored, part, dtype, device) for part in stored.parts_of(name)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _part_on(
    stored: GGUFTensors, part: StoredTensor, dtype: torch.dtype, device: torch.device
) -> Tensor:
    rows_R = stored.order_of_rows(part) if part.info.kind in EVERYWHERE else None
    if rows_R is None:  # the host dequantises it, and does to its numbers what has to be done
        return to_device(stored.dequantised(part).to(dtype), device)
    raw_RX = part.data.reshape(len(rows_R), -1).view(np.uint8)
    C = math.prod(part.info.shape) // len(rows_R)
    numbers_RC = torch.empty(len(rows_R), C, dtype=dtype, device=device)
    size = max(PIECE // C, 1)
    for first in range(0, len(rows_R), size):
        piece = to_device(torch.from_numpy(raw_RX[first : first + size].copy()), device)
        at = to_device(torch.from_numpy(rows_R[first : first + size]), device)
        numbers_RC[at] = dequantised(piece, part.info.kind).to(dtype)
    return numbers_RC.view(part.info.shape)
