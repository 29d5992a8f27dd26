"""Loads a base in pieces: under ZeRO-3 no process ever holds all of it on its device.

transformers builds the model with every weight spread over the processes; the first process reads
the files and distributes each weight (transformers.integrations.HfDeepSpeedConfig). Until the
training engine takes over, everything but the repeated layers (embeddings, final norm) is whole in
every process, and a layer is whole while it runs. So processes must run the base equally often and
at the same time, as they do in training.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit import console
from medusa_kit.base.files import from_pretrained, quiet_transformers, resolve
from medusa_kit.base.model import BaseModel
from medusa_kit.base.placement import DTYPES
from medusa_kit.base.quantization import num_weights
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.processes import distributed
from medusa_kit.train.processes.deepspeed_setup import (
    deepspeed_config,
    import_deepspeed,
    quiet,
    start_process_group,
)


class ShardedBase(BaseModel):
    """A base whose weights are spread over the processes from the start."""

    def __init__(self, model: Any, deepspeed: Any, *about: Any) -> None:
        self._gathering = _GatheredLayers(model, deepspeed)
        super().__init__(model, *about)

    def _made_whole(self, weight: Tensor) -> contextlib.AbstractContextManager[Any]:
        return self._gathering.whole(weight)

    def hand_over(self) -> None:
        """Release everything that is whole, since the training engine gathers weights itself."""
        self._gathering.close()


def loads_layerwise(recipe: TrainRecipe) -> bool:
    """Whether an unquantised base is trained under ZeRO-3 in several processes."""
    options = recipe.deepspeed
    return (
        recipe.stage == "medusa2"
        and recipe.joint_options.moves != "qlora"
        and options.enabled
        and options.zero_stage == 3
        and distributed.world() > 1
        and resolve(recipe.base.model, weights=False)[0] in ("folder", "hub")
    )


def load(recipe: TrainRecipe, device: torch.device) -> ShardedBase:
    """The recipe's base in pieces. Raises as load_base_model does."""
    options = recipe.base
    source, location = resolve(options.model)
    quiet_transformers()
    with quiet():
        deepspeed = import_deepspeed(device)
        start_process_group(deepspeed, device)
        from transformers.integrations import HfDeepSpeedConfig

        config = deepspeed_config(recipe)
        # True would replace torch's own `linear` for the rest of the process.
        config["zero_optimization"]["memory_efficient_linear"] = False
        config["bf16"]["enabled"] = options.dtype == "bfloat16"  # else it is read in float32
        alive = HfDeepSpeedConfig(config)  # transformers finds it as long as it exists
        dtype = DTYPES[options.dtype]
        model, tokenizer = from_pretrained(location, dtype, options.revision, "sdpa", False)
        del alive
        base = ShardedBase(model, deepspeed, tokenizer, options.model, source, options.revision)
    console.note(f"the base is spread over {distributed.world()} processes")
    return base


class _GatheredLayers:
    """Keeps a sharded model usable without an engine: layers whole while they run, the rest always.

    The layers are the list of modules with the most weights, since experts inside are lists too.
    """

    def __init__(self, model: nn.Module, deepspeed: Any) -> None:
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        layers = list(max(lists, key=num_weights, default=[]))
        inside = {id(weight) for layer in layers for weight in layer.parameters()}
        rest = [weight for weight in model.parameters() if id(weight) not in inside]
        self._whole = deepspeed.zero.GatheredParameters
        self._open: dict[nn.Module | None, contextlib.AbstractContextManager[None]] = {}
        self._hooks = []
        for layer in layers:
            before = layer.register_forward_pre_hook(self._gather)
            after = layer.register_forward_hook(self._release, always_call=True)
            self._hooks += [before, after]
        self._enter(None, rest)

    def whole(self, weight: Tensor) -> contextlib.AbstractContextManager[Any]:
        """A context in which one weight is whole in every process."""
        status = getattr(weight, "ds_status", None)  # buffers have none
        is_whole = status is None or status.name == "AVAILABLE"
        return contextlib.nullcontext() if is_whole else self._whole([weight])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for whole in self._open.values():
            whole.__exit__(None, None, None)
        self._open.clear()

    def _gather(self, layer: nn.Module, _: Any) -> None:
        self._enter(layer, list(layer.parameters()))

    def _release(self, layer: nn.Module, *_: Any) -> None:
        if (whole := self._open.pop(layer, None)) is not None:
            whole.__exit__(None, None, None)

    def _enter(self, layer: nn.Module | None, weights: list[nn.Parameter]) -> None:
        whole = self._whole(weights)
        whole.__enter__()
        self._open[layer] = whole
