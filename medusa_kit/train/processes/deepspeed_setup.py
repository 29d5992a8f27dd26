"""Configures and starts DeepSpeed, quietly. The only file that imports deepspeed."""

import contextlib
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from medusa_kit.errors import ConfigError
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.processes import distributed


def deepspeed_config(recipe: TrainRecipe) -> dict[str, Any]:
    """The config for deepspeed.initialize."""
    options = recipe.deepspeed
    zero: dict[str, Any] = {"stage": options.zero_stage}
    if options.offload.optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if options.offload.parameters:
        zero["offload_param"] = {"device": "cpu"}
    if options.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = options.persistence_threshold
    return {
        "train_micro_batch_size_per_gpu": 1,  # required, but we cut micro-batches ourselves
        "gradient_accumulation_steps": recipe.train.accumulation,
        "gradient_clipping": recipe.train.grad_clip,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        # It computes in 16 bits with all that is trained and keeps float32 copies to update.
        # Adapters and heads are few weights: they stay in float32 beside a base in any dtype.
        "bf16": {"enabled": recipe.trains_whole_base and recipe.base.dtype == "bfloat16"},
        "steps_per_print": sys.maxsize,
    }


def import_deepspeed(device: torch.device) -> Any:
    """Import it for this device, before it detects one by itself."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
        from deepspeed.utils import logger
    except Exception as error:  # it looks for compilers and devices while it is imported
        raise ConfigError(
            f"deepspeed cannot be imported here: {error}", hint="add deepspeed.enabled=false"
        ) from error
    logger.setLevel(logging.ERROR)
    # gloo can do the same, and this op would be compiled at first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def start_process_group(deepspeed: Any, device: torch.device) -> None:
    """Join the process group; a single process makes its own on a free loopback port."""
    if distributed.world() == 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        defaults = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": "0",
            "LOCAL_RANK": str(device.index or 0),
            "WORLD_SIZE": "1",
        }
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
    distributed.start(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with distributed.libraries_off_stdout():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps DeepSpeed's prints and logs off stdout, which is for data."""
    with distributed.libraries_off_stdout(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
