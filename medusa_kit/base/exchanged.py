"""How often a watched model's modules have been given a module or a parameter: torch tells.

Whoever exchanges two layers between two looks at a model, and puts them back, leaves it as it was,
but an answer meanwhile is of neither model. So each time counts, whatever comes of it.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Exchanges:
    """How often modules of one model were given something."""

    def __init__(self) -> None:
        self.number = 0

    def watch(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            _of_module[module] = self


_of_module: "WeakKeyDictionary[nn.Module, Exchanges]" = WeakKeyDictionary()


def _note(owner: nn.Module, name: str, given: Any) -> None:
    if torch.compiler.is_compiling():  # forwards slice a list of layers, which makes another list;
        return  # compiled code would hold only for the modules that are watched at the time
    exchanges = _of_module.get(owner)
    if exchanges is not None:
        exchanges.number += 1


register_module_module_registration_hook(_note)
register_module_parameter_registration_hook(_note)
