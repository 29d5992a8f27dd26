"""Drafts that read layers, damaged: one error for each fault, of the config and of the weights.

`kind`, as messages call it: `other_kinds.DFLASH` or `EAGLE_3`; of any other draft model, `A_MODEL`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medusa_kit.base.faults import finite
from medusa_kit.base.files import resolve
from medusa_kit.errors import CheckpointError, ConfigError

A_MODEL = "a model of its own"
SAFETENSORS = ".safetensors"
WEIGHTS = (SAFETENSORS, ".bin")
MAX_LAYERS = 1024  # more than any draft has, and few enough to list
LARGEST = 2**24  # more than any layer's size, and small enough for torch to multiply two of them


@contextmanager
def reading_config(name: str, kind: str) -> Iterator[None]:
    """Turns what a config with values of other kinds raises into ConfigError."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError,
            ValueError) as error:  # fmt: skip
        raise ConfigError(
            f"draft model {name!r}, {kind}: its config cannot be read: {error!r}",
            hint="copy it again from where the draft is from",
        ) from error


@contextmanager
def loading(name: str, kind: str) -> Iterator[None]:
    """Turns what a network raises that its config or its file of weights makes impossible into
    CheckpointError."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, ArithmeticError, AttributeError, LookupError, RuntimeError,
            TypeError, ValueError) as error:  # fmt: skip
        what = repr(error) if isinstance(error, LookupError) else error  # a key says too little
        raise CheckpointError(
            f"draft model {name!r}, {kind}, cannot be loaded: {what}",
            hint="copy it again from where the draft is from",
        ) from error


def wrong_sizes(layer: Any) -> str | None:
    """What makes a layer of these sizes impossible, for a message; None where nothing does."""
    heads, keys = layer.num_attention_heads, layer.num_key_value_heads
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        if not isinstance(size := getattr(layer, key), int) or not 0 < size <= LARGEST:
            return f"has {key} {size!r}; expected a whole number from 1 to {LARGEST:,}"
    if heads % keys:
        return f"has {heads} heads and {keys} of keys; expected a multiple"
    if layer.head_dim % 2:
        return f"has head_dim {layer.head_dim}; expected an even number"
    return None


def check_layers(name: str, kind: str, count: Any) -> None:
    """Raises ConfigError for a number of layers that no draft has."""
    if type(count) is not int or not 1 <= count <= MAX_LAYERS:
        raise ConfigError(
            f"draft model {name!r}, {kind}, has num_hidden_layers {count!r}; expected a whole "
            f"number from 1 to {MAX_LAYERS:,}",
            hint="copy it again from where the draft is from",
        )


def check_weights(name: str, kind: str, suffixes: Sequence[str] = WEIGHTS) -> None:
    """Raises CheckpointError for a draft's folder without weights in files of these suffixes, or
    with a safetensors file that is cut off: its length alone is looked at."""
    from safetensors import safe_open

    source, folder = resolve(name, weights=False)
    if source != "folder":
        return
    files = [file for file in Path(folder).iterdir() if file.suffix in suffixes and file.is_file()]
    if not files:
        raise CheckpointError(
            f"draft model {name!r}, {kind}: the folder holds no weights ({', '.join(suffixes)})",
            hint="copy it again from where the draft is from",
        )
    for file in files:
        if file.suffix == SAFETENSORS:
            with loading(name, kind), safe_open(file, "pt"):
                pass


def check_stored_numbers(name: str, kind: str) -> None:
    """The same of the safetensors files of a draft's folder, one tensor after the other."""
    from safetensors import safe_open

    source, folder = resolve(name, weights=False)
    if source != "folder":
        return
    for path in sorted(Path(folder).glob(f"*{SAFETENSORS}")):
        with loading(name, kind), safe_open(path, "pt") as file:
            found = finite.damage_in((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
        if found is not None:
            raise _no_numbers(name, kind, f"{path.name}: {found}")


def check_numbers(name: str, kind: str, model: Any) -> None:
    """Raises CheckpointError where a weight of a draft is NaN or infinite."""
    if (found := finite.damage_in(model.named_parameters())) is not None:
        raise _no_numbers(name, kind, found)


def _no_numbers(name: str, kind: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"draft model {name!r}, {kind}: {found}",
        hint="copy it again; if the base is read in a narrow dtype, read it in a wider one",
    )
