"""Which forward hooks on a model's modules are foreign: neither ours nor transformers' own.

Code that reads a model's weights directly, as the C++ steps do, runs no hooks, so it must know
whether there are any.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as torch_module

Hook = TypeVar("Hook", bound=Callable[..., Any])

EVERY_MODULE = "every module"
OURS = "of_medusa_kit"
# transformers' hooks that collect outputs (output_hidden_states) and change nothing.
WATCHING = "transformers.utils.output_capturing"
KINDS = ("_forward_hooks", "_forward_pre_hooks")


def ours(hook: Hook) -> Hook:
    """Mark a hook as ours: it does not change what its module computes."""
    setattr(hook, OURS, True)
    return hook


def foreign_hooks(model: nn.Module) -> list[tuple[str, Any]]:
    """(module's name, hook) of every hook that may change what the model computes."""
    found = [(name, hook) for name, module in model.named_modules() for hook in _hooks(module)]
    return found + [(EVERY_MODULE, hook) for hook in _hooks(torch_module, "_global")]


def _hooks(owner: Any, prefix: str = "") -> Iterator[Any]:
    for kind in KINDS:
        for hook in list(getattr(owner, prefix + kind).values()):
            watching = getattr(hook, "__module__", None) == WATCHING
            if not watching and not getattr(hook, OURS, False):
                yield hook
