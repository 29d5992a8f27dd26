"""AdamW, or Muon for the matrices of the heads' networks and AdamW for all else.

Muon (kellerjordan.github.io/posts/muon) orthogonalises each matrix's momentum. torch's own is used,
its updates scaled to the size of AdamW's (arXiv 2502.16982, §2.2), so one learning rate suits both.
It multiplies in bfloat16. As usual, input and output embeddings (own projections), gains, norms
and adapters stay with AdamW.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from medusa_kit import console
from medusa_kit.errors import ConfigError
from medusa_kit.heads import MedusaHeads
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.cpu_products import fast_in_bfloat16
from medusa_kit.train.stages import Medusa1, Medusa2

Group = dict[str, Any]
Part = tuple[list[nn.Parameter], float]  # and their factor of the learning rate


class Optimizers:
    """Several that step together, each with its own part of the weights."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.all = tuple(optimizers)

    @property
    def param_groups(self) -> list[Group]:
        return [group for optimizer in self.all for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"all": [optimizer.state_dict() for optimizer in self.all]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.all, state["all"], strict=True):
            optimizer.load_state_dict(saved)


def make_optimizer(
    module: Medusa1 | Medusa2, recipe: TrainRecipe, fused: bool = False
) -> tuple[torch.optim.AdamW | Optimizers, list[float]]:
    """(the recipe's optimiser, the factor of the learning rate of each of its groups)."""
    parts = _not_empty(module.groups())
    if recipe.train.optimizer == "adamw":
        return _adamw(parts, recipe, fused), [factor for _, factor in parts]
    matrices = set(map(id, network_matrices(module.heads)))
    by_muon = _not_empty([([p for p in part if id(p) in matrices], f) for part, f in parts])
    by_adamw = _not_empty([([p for p in part if id(p) not in matrices], f) for part, f in parts])
    optimizers: list[torch.optim.Optimizer] = []
    if by_muon:
        optimizers.append(
            torch.optim.Muon(
                _groups(by_muon),
                lr=recipe.train.learning_rate,
                weight_decay=recipe.train.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if by_adamw:
        optimizers.append(_adamw(by_adamw, recipe, fused))
    return Optimizers(optimizers), [factor for _, factor in (*by_muon, *by_adamw)]


def moments(heads: MedusaHeads, trained: int, recipe: TrainRecipe) -> int:
    """Numbers that the optimiser keeps: two for each trained weight, of Muon's matrices one."""
    muon = recipe.train.optimizer == "muon"
    return 2 * trained - (sum(p.numel() for p in network_matrices(heads)) if muon else 0)


def network_matrices(heads: MedusaHeads) -> list[nn.Parameter]:
    """The trained weights [out, in] of the heads' layers, without those of own projections."""
    projections = set(map(id, heads.projections.parameters()))
    linear = [module for module in heads.modules() if isinstance(module, nn.Linear)]
    weights = [p for layer in linear for p in layer.parameters() if p.ndim == 2 and p.requires_grad]
    return [weight for weight in weights if id(weight) not in projections]


def check_optimizer(recipe: TrainRecipe, device: torch.device) -> None:
    """Raises ConfigError where torch lacks the recipe's optimiser; warns where it is slow."""
    if recipe.train.optimizer != "muon":
        return
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"train.optimizer 'muon' with torch {torch.__version__}; torch has it from 2.9 on",
            hint="pip install 'torch>=2.9', or train.optimizer=adamw",
        )
    if not fast_in_bfloat16(device):
        console.warn(
            f"train.optimizer 'muon' multiplies matrices in bfloat16, which {device.type} here has "
            "no instructions for; 'adamw' is faster here"
        )


def set_learning_rate(optimizer: Any, learning_rate: float, factors: Sequence[float]) -> None:
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        group["lr"] = learning_rate * factor


def _adamw(parts: Sequence[Part], recipe: TrainRecipe, fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        _groups(parts),
        lr=recipe.train.learning_rate,
        weight_decay=recipe.train.weight_decay,
        fused=fused,
    )


def _groups(parts: Sequence[Part]) -> list[Group]:
    return [{"params": parameters} for parameters, _ in parts]


def _not_empty(parts: Sequence[Part]) -> list[Part]:
    return [(parameters, factor) for parameters, factor in parts if parameters]
