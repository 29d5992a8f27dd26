"""Random states of a process, of CPU and GPUs, kept with a checkpoint for dropout.

The order of rows does not depend on them: it follows from the recipe's seed.
"""

from pathlib import Path
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.errors import CheckpointError, in_one_line
from medusa_kit.train.run.torch_file import read_torch_file


def save_random_state(path: Path) -> None:
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "cuda": []}
    if torch.cuda.is_initialized():  # otherwise nothing has run on a GPU
        state["cuda"] = torch.cuda.get_rng_state_all()
    torch.save(state, path)


def load_random_state(path: Path) -> None:
    """Raises CheckpointError for a file that cannot be read."""
    try:
        state = read_torch_file(path)
        if isinstance(state, torch.Tensor):  # as older versions wrote it
            state = {"cpu": state, "cuda": []}
        torch.set_rng_state(state["cpu"])
        here = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        for index, state_of_gpu in enumerate(state["cuda"][:here]):
            torch.cuda.set_rng_state(state_of_gpu, index)
    except Exception as error:  # zip, pickle, key and OS errors
        raise CheckpointError(
            f"{path} cannot be read: {in_one_line(error)}",
            hint="add --fresh to start over",
        ) from error
    if len(state["cuda"]) != here:
        console.warn(
            f"the checkpoint has the random states of {len(state['cuda'])} GPUs, this process sees "
            f"{here}: dropout will differ from an uninterrupted run"
        )
