"""Whether the functions of transformers that a model runs are transformers' own.

Liger, Unsloth and others put functions of theirs in a module's or a class's place. A forward of
torch runs these; what reads a model's weights itself, as the C++ steps do, must know of them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

PLAIN_CODE = ("torch", "transformers", "medusa_kit")
# What transformers imports into its own modules.
IMPORTED = ("kernels", "accelerate", "safetensors", "numpy", "tqdm", "typing_extensions")
OWN = {*PLAIN_CODE, *IMPORTED, *sys.stdlib_module_names}
ATTENTION = "transformers.modeling_utils"  # has the functions of attention by name
STOCK = ("sdpa", "eager")


def replaced_function(config: Any) -> str | None:
    """The name of a function of this config's family that other code has taken the place of. What
    nobody has imported is as it came."""
    family = config.model_type.removesuffix("_text").replace("-", "_")
    functions = _functions([f"transformers.models.{family}.modeling_{family}"])
    found = (name for name, one in functions if not is_own(one))
    return next(found, None)


def functions_of(kinds: Iterable[type]) -> list[tuple[str, Any]]:
    """(name, function) of the modules of transformers that define these classes."""
    return list(_functions({kind.__module__ for kind in kinds}))


def attention_of(name: str | None) -> Callable[..., Any] | None:
    """The function that transformers knows by this name, where it is not its own."""
    functions = getattr(sys.modules.get(ATTENTION), "ALL_ATTENTION_FUNCTIONS", {})
    function = functions.get(name)
    return None if function is None or is_own(function) else function


def _functions(names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in sorted(names):
        module = sys.modules.get(name)
        if module is not None and name.split(".")[0] == "transformers":
            yield from _in_module(module)
    functions = getattr(sys.modules.get(ATTENTION), "ALL_ATTENTION_FUNCTIONS", {})
    yield from ((f"attention {name}", functions[name]) for name in STOCK if name in functions)


def _in_module(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Functions in it and of its classes, and classes of others in it. Where torch compiles code of
    the module, it puts functions beside it, named with two underscores, that this code cannot call.
    """
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        if not isinstance(value, type):
            if callable(value):
                yield name, value
        elif value.__module__ == module.__name__:
            for method, function in list(vars(value).items()):
                if isinstance(function, FunctionType):
                    yield f"{name}.{method}", function
        else:
            yield name, value


def is_own(value: Any) -> bool:
    """Whether the code of transformers, torch or Python is all that a call of `value` enters
    first. Where a function was defined is in its globals: decorators copy all that it says of
    itself."""
    where = value.__globals__.get("__name__") if isinstance(value, FunctionType) else None
    if where is None:
        where = (value if isinstance(value, type) else type(value)).__module__
    insides = (getattr(value, name, None) for name in ("__wrapped__", "func", "__func__"))
    inside = next((one for one in insides if one is not None), None)
    return str(where).split(".")[0] in OWN and (inside is None or is_own(inside))
