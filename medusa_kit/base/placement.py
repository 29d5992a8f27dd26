"""Where a base model is put and in which dtype: what `auto` stands for, told without a weight."""

from typing import Any

import torch

from medusa_kit.errors import ConfigError
from medusa_kit.settings.engine import allowed

AUTO = "auto"
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in allowed("dtype") if name != AUTO
}


def asked_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """What to load in; AUTO where the checkpoint decides, which only its config can tell.

    On an accelerator a step reads every weight, so that float32 of a bfloat16 checkpoint would
    double its time for no more information. A CPU computes in float32 either way: its kernels hold
    the weights in the smallest form that expands to the same bits.
    """
    if dtype != AUTO:
        return DTYPES[dtype]
    return AUTO if device.type == "cuda" else torch.float32


def load_dtype(dtype: torch.dtype | str, config: Any) -> torch.dtype | str:
    """What a checkpoint with this config is loaded in, after `asked_dtype`.

    AUTO once more for a config that names no dtype: transformers then looks at the weights.
    """
    return (stored_dtype(config) or AUTO) if isinstance(dtype, str) else dtype


def stored_dtype(config: Any) -> torch.dtype | None:
    """The dtype of a checkpoint by its config; None where it names none.

    float32 for what heads cannot be computed in, such as eight bits.
    """
    text = config.get_text_config()
    told = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    if isinstance(told, str):
        told = getattr(torch, told.removeprefix("torch."), None)
    if told is None:
        return None
    return told if told in DTYPES.values() else torch.float32


def pick_device(device: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises ConfigError for one that is not there."""
    if device == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown", hint="use auto, cpu or cuda") from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r} was asked for, but torch sees no CUDA device", hint="use cpu"
        )
    return wanted
