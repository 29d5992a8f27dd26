"""A model as the C++ decoder runs it, or why it cannot."""

from typing import Any

import torch

from medusa_kit.base.quantization import is_quantised
from medusa_kit.infer.model_parts import ModelParts, Unsupported
from medusa_kit.infer.model_parts import describe as parts_of


def describe(model: Any, matrices_on: str = "cpu") -> ModelParts:
    """Raises Unsupported, with the reason. `matrices_on` the device `meta`: their numbers are not
    there, but those of norms and biases are.
    """

    def check_weights(model: Any) -> None:
        weights = {parameter.dtype for parameter in model.parameters()}
        devices = {parameter.device.type for parameter in model.parameters()}
        if weights != {torch.float32} or not devices <= {"cpu", matrices_on}:
            raise Unsupported("weights are not all float32 on a CPU")
        if any(is_quantised(parameter) for parameter in model.parameters()):
            raise Unsupported("weights are quantised")

    parts = parts_of(model, check_weights)
    if parts.head_size % 16:
        raise Unsupported(f"heads of {parts.head_size} numbers; 16 must divide them")
    return parts
