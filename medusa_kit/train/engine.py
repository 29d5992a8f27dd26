"""Training engines, which run the optimiser: DeepSpeed or plain torch.

Both use the same AdamW (plain torch also Muon), clip the same norm and give the same losses, in any
number of processes (over gloo on CPU, nccl on GPUs). A loss passed to `backward` is the
micro-batch's share of the update's mean, so gradients are summed over micro-batches and processes.
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from medusa_kit.errors import CheckpointError, ConfigError, in_one_line
from medusa_kit.installing import extra
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.batching import Batch
from medusa_kit.train.loss.loss import HeadsLoss
from medusa_kit.train.optimizer import make_optimizer, set_learning_rate
from medusa_kit.train.processes import distributed
from medusa_kit.train.processes.deepspeed_setup import (
    deepspeed_config,
    import_deepspeed,
    quiet,
    start_process_group,
)
from medusa_kit.train.run.identity import GO_ON_AS_BEGUN
from medusa_kit.train.run.torch_file import read_torch_file
from medusa_kit.train.stages import Medusa1, Medusa2, Terms

Stage = Medusa1 | Medusa2
Named = Iterator[tuple[str, Tensor]]  # tensors by name


class TrainingEngine(Protocol):
    """`forward` and `backward` for each micro-batch, then `norm` and one `update`.

    `norm` is that of all processes' gradients, on their device; None where it is known only with
    the update, which returns it then. Where it is not finite, the run must end.
    """

    module: Stage

    def forward(self, batch: Batch, terms: Terms) -> HeadsLoss: ...
    def backward(self, loss: Tensor) -> None: ...
    def norm(self) -> Tensor | None: ...
    def update(self, learning_rate: float) -> float | None: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def trained(self) -> Named: ...  # weights, as far as this process has them
    def moments(self) -> Named: ...  # what the optimiser keeps of them, likewise
    def whole(
        self, parameters: Sequence[nn.Parameter]
    ) -> contextlib.AbstractContextManager[None]: ...
    def close(self) -> None: ...


def make_engine(module: Stage, recipe: TrainRecipe, device: torch.device) -> TrainingEngine:
    """The engine of the recipe. Raises ConfigError when it needs deepspeed, which is missing."""
    check_packages(recipe)
    if not recipe.deepspeed.enabled:
        return PlainEngine(module, recipe, device)
    return DeepspeedEngine(module, recipe, device)


def check_packages(recipe: TrainRecipe) -> None:
    """Raises ConfigError where a package is missing that the recipe needs."""
    adapters = recipe.stage == "medusa2" and not recipe.trains_whole_base
    needed = {
        "deepspeed": ("deepspeed.enabled is true", "add deepspeed.enabled=false"),
        "peft": ("joint.moves is of adapters", "take joint.moves=full"),
    }
    for package, (why, otherwise) in needed.items():
        wanted = recipe.deepspeed.enabled if package == "deepspeed" else adapters
        if wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{why}, but the package {package} is not installed",
                hint=f"{extra('train')}, or {otherwise}",
            )


class PlainEngine:
    """The optimiser in plain torch; several processes sum their gradients."""

    def __init__(self, module: Stage, recipe: TrainRecipe, device: torch.device) -> None:
        check_precision(recipe)
        _check_trained(module)
        self.module = module
        self.grad_clip = recipe.train.grad_clip
        self.optimizer, self._factors = make_optimizer(module, recipe, fused=True)
        self._owns_group = distributed.start(device)
        self._norm: Tensor | None = None  # of the gradients of the update to come

    def forward(self, batch: Batch, terms: Terms) -> HeadsLoss:
        return self.module(batch, terms)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def norm(self) -> Tensor:
        if distributed.world() > 1:
            for parameter in self._weights:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = distributed.summed(gradient)
        gradients = [p.grad for p in self._weights if p.grad is not None]
        self._norm = torch.nn.utils.get_total_norm(gradients)
        return self._norm

    def update(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate, self._factors)
        norm = self.norm() if self._norm is None else self._norm
        torch.nn.utils.clip_grads_with_norm_(self._weights, self.grad_clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._norm = None

    @property
    def _weights(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def trained(self) -> Named:
        yield from _trained_state(self.module).items()

    def moments(self) -> Named:
        yield from _tensors_of(self.optimizer)

    def save(self, folder: Path) -> None:
        if distributed.is_main():
            state = {
                "weights": _trained_state(self.module),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(state, folder / "state.pt")

    def load(self, folder: Path) -> None:
        path = folder / "state.pt"
        try:
            state = read_torch_file(path)
            _check_same_dtypes(state["weights"], _trained_state(self.module), path)
            self.module.load_state_dict(state["weights"], strict=False)
            self.optimizer.load_state_dict(state["optimizer"])
        except ConfigError:
            raise
        except Exception as error:  # zip, pickle, key and OS errors
            raise CheckpointError(
                f"{path} cannot be read: {in_one_line(error)}",
                hint="add --fresh to start over",
            ) from error

    def whole(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        if self._owns_group:
            torch.distributed.destroy_process_group()


class DeepspeedEngine:
    """A DeepSpeedEngine (ZeRO stage 0 to 3) with the same interface."""

    def __init__(self, module: Stage, recipe: TrainRecipe, device: torch.device) -> None:
        self.module = module
        config = deepspeed_config(recipe)
        self._shards = bool(recipe.deepspeed.zero_stage) or config["bf16"]["enabled"]
        self._scale = recipe.train.accumulation * distributed.world()
        self._step_due = False
        self._owns_group = not torch.distributed.is_initialized()
        optimizer, self._factors = make_optimizer(module, recipe)
        with quiet():
            self._deepspeed = import_deepspeed(device)
            start_process_group(self._deepspeed, device)
            self.engine, self.optimizer, _, _ = self._deepspeed.initialize(
                model=module, optimizer=optimizer, config=config
            )
        if recipe.deepspeed.zero_stage == 3:
            # The hooks of the module's forward and backward gather these once a micro-step, since
            # the losses read them chunk by chunk and head by head.
            for parameter in module.parameters_read_outside():
                self._deepspeed.zero.register_external_parameter(module, parameter)

    def forward(self, batch: Batch, terms: Terms) -> HeadsLoss:
        return self.engine(batch, terms)

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed counts a step for every micro-batch and decides which of them updates, so
        # update() takes the last step, after setting the learning rate. It averages where we sum.
        if self._step_due:
            self.engine.step()
        self.engine.backward(loss * self._scale)
        self._step_due = True

    def norm(self) -> Tensor | None:
        """None where DeepSpeed's own optimisers have the gradients."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return None if self._shards else torch.nn.utils.get_total_norm(gradients)

    def update(self, learning_rate: float) -> float | None:
        set_learning_rate(self.optimizer, learning_rate, self._factors)
        self.engine.step()  # ZeRO skips one whose norm is not finite
        self._step_due = False
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def trained(self) -> Named:
        """The trained weights; with ZeRO-3 this process's parts."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield name, getattr(parameter, "ds_tensor", parameter).detach()

    def moments(self) -> Named:
        yield from _tensors_of(getattr(self.optimizer, "optimizer", self.optimizer))

    def save(self, folder: Path) -> None:
        with quiet():
            self.engine.save_checkpoint(
                str(folder), tag="engine", save_latest=False, exclude_frozen_parameters=True
            )

    def load(self, folder: Path) -> None:
        try:
            with quiet():
                self.engine.load_checkpoint(str(folder), tag="engine", load_module_strict=False)
        except Exception as error:  # whatever DeepSpeed raises for a damaged file
            raise CheckpointError(
                f"the checkpoint in {folder} cannot be read: {error}",
                hint="add --fresh to start over",
            ) from error

    def whole(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        """A context in which these parameters are whole in every process (ZeRO-3 shards them)."""
        return self._deepspeed.zero.GatheredParameters(list(parameters))

    def close(self) -> None:
        self.engine.destroy()
        if self._owns_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def check_precision(recipe: TrainRecipe) -> None:
    """Raises ConfigError where plain torch would update a whole base in 16 bits."""
    low = recipe.trains_whole_base and recipe.base.dtype != "float32"
    if low and not recipe.deepspeed.enabled:
        raise ConfigError(
            f"stage 'medusa2' with joint.moves 'full' and base.dtype {recipe.base.dtype!r} "
            "needs deepspeed, which keeps float32 copies of the weights: small updates vanish "
            "in 16 bits",
            hint="use base.dtype=float32, joint.moves=lora, or deepspeed.enabled=true with "
            "train.optimizer=adamw",
        )


def _check_trained(module: Stage) -> None:
    """Raises ConfigError for weights that would be updated in 16 bits."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype.itemsize < 4:
            raise ConfigError(
                f"{name} would be trained in {parameter.dtype}, where small updates vanish",
                hint="load the base in float32",
            )


def _check_same_dtypes(saved: dict[str, Tensor], trained: dict[str, Tensor], path: Path) -> None:
    for name, weight in saved.items():
        if name in trained and weight.dtype != trained[name].dtype:
            raise ConfigError(
                f"{path} holds {name} in {weight.dtype}; it is trained in "
                f"{trained[name].dtype} now",
                hint=GO_ON_AS_BEGUN,
            )


def _tensors_of(optimizer: Any) -> Named:
    """What an optimiser keeps of weights."""
    for one in getattr(optimizer, "all", (optimizer,)):
        for kept in one.state.values():
            for name, value in kept.items():
                if isinstance(value, Tensor):
                    yield f"the optimiser's {name}", value


def _trained_state(module: Stage) -> dict[str, Tensor]:
    """The trained weights only: a frozen base need not be saved."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
