"""What drives the optimiser: DeepSpeed, or plain torch. The only file that imports deepspeed.

Both take the same AdamW over the heads' parameters in float32, clip the same norm and give the same
losses. One process; on CPU DeepSpeed talks gloo on the loopback, on a GPU nccl.
"""

import contextlib
import importlib.util
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from medusa_kit.config import TrainRecipe
from medusa_kit.errors import ConfigError
from medusa_kit.train.features import Batch
from medusa_kit.train.loss import HeadsLoss, LossModule


class TrainingEngine(Protocol):
    """`forward` and `backward` for each micro-batch, then one `update`."""

    module: LossModule

    def forward(self, batch: Batch) -> HeadsLoss: ...
    def backward(self, loss: Tensor) -> None: ...
    def update(self, learning_rate: float) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


def make_engine(module: LossModule, recipe: TrainRecipe) -> TrainingEngine:
    """The engine that the recipe asks for. Raises ConfigError when deepspeed is not installed."""
    if not recipe.deepspeed.enabled:
        return PlainEngine(module, recipe)
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "deepspeed.enabled is true, but the package deepspeed is not installed",
            hint="pip install 'medusa-kit[train]', or add deepspeed.enabled=false",
        )
    return DeepspeedEngine(module, recipe)


class PlainEngine:
    """AdamW in plain torch."""

    def __init__(self, module: LossModule, recipe: TrainRecipe) -> None:
        self.module = module
        self.accumulation = recipe.train.accumulation
        self.grad_clip = recipe.train.grad_clip
        self.optimizer = _adamw(module, recipe)

    def forward(self, batch: Batch) -> HeadsLoss:
        return self.module(batch.hidden_PD, batch.ahead_PJ, *(batch.soft or ()))

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation).backward()

    def update(self, learning_rate: float) -> None:
        _set_learning_rate(self.optimizer, learning_rate)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return {"heads": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        pass


class DeepspeedEngine:
    """A DeepSpeedEngine (ZeRO stage 0) with the same face."""

    def __init__(self, module: LossModule, recipe: TrainRecipe) -> None:
        self.module = module
        self._step_due = False
        self._owns_group = not torch.distributed.is_initialized()
        with _quiet():
            deepspeed = _import_deepspeed(module.heads.base.device)
            _start_process_group(deepspeed, module.heads.base.device)
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=module, optimizer=_adamw(module, recipe), config=_deepspeed_config(recipe)
            )

    def forward(self, batch: Batch) -> HeadsLoss:
        return self.engine(batch.hidden_PD, batch.ahead_PJ, *(batch.soft or ()))

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed steps with every micro-batch and decides itself which one updates, so the last
        # step is taken by update(), after the learning rate is set.
        if self._step_due:
            self.engine.step()
        self.engine.backward(loss)
        self._step_due = True

    def update(self, learning_rate: float) -> None:
        _set_learning_rate(self.optimizer, learning_rate)
        self.engine.step()
        self._step_due = False

    def state(self) -> dict[str, Any]:
        return {"heads": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        self.engine.destroy()
        if self._owns_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _adamw(module: LossModule, recipe: TrainRecipe) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        module.heads.trainable_parameters(),
        lr=recipe.train.learning_rate,
        weight_decay=recipe.train.weight_decay,
    )


def _set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _deepspeed_config(recipe: TrainRecipe) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # a micro-batch is ours to cut; this one is a label
        "gradient_accumulation_steps": recipe.train.accumulation,
        "gradient_clipping": recipe.train.grad_clip,
        "zero_optimization": {"stage": recipe.deepspeed.zero_stage},
        "steps_per_print": sys.maxsize,
    }


def _import_deepspeed(device: torch.device) -> Any:
    """Import it for this device, before it looks around for itself."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
        from deepspeed.utils import logger
    except Exception as error:  # it looks for compilers and devices while it is imported
        raise ConfigError(
            f"deepspeed cannot be imported here: {error}", hint="add deepspeed.enabled=false"
        ) from error
    logger.setLevel(logging.ERROR)
    # One process has nobody to share memory with, and the op would be compiled at first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _start_process_group(deepspeed: Any, device: torch.device) -> None:
    """A group of one, on a free loopback port, unless a launcher has set the scene."""
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
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed prints and logs to stdout, which is ours for data."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
