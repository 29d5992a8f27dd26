"""A GGUF file's metadata are compared with its tensors, before a library acts on them.

A single wrong number there can make a library build a model of a billion layers.
"""

import math
import re
from pathlib import Path
from typing import Any

from medusa_kit.base.gguf_files.architectures import check_architecture
from medusa_kit.base.gguf_files.header import AGAIN, Array
from medusa_kit.base.gguf_files.parts import TOKENS, GGUFModel, read_headers
from medusa_kit.errors import CheckpointError

ARCHITECTURE = "general.architecture"
LAYER = re.compile(r"(?:enc\.|dec\.)?blk\.(\d+)\.")
MAX_VALUES = {  # how large a value of an architecture may be
    "context_length": 1 << 30,
    "feed_forward_length": 1 << 24,
    "expert_feed_forward_length": 1 << 24,
    "expert_shared_feed_forward_length": 1 << 24,
    "attention.head_count": 1 << 14,
    "attention.head_count_kv": 1 << 14,
    "attention.key_length": 1 << 14,
    "attention.value_length": 1 << 14,
    "rope.dimension_count": 1 << 14,
    "expert_count": 1 << 12,
    "expert_used_count": 1 << 12,
    "attention.sliding_window": 1 << 30,
}
MAY_BE_ZERO = ("expert_count", "expert_used_count", "attention.sliding_window")
POSITIVE = ("rope.freq_base", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")


def checked(path: Path) -> GGUFModel:
    """Return the headers of all parts, checked. No tensor is read, nothing is mapped.

    Raises CheckpointError for a file that is damaged or cut off, whose parts are not all there, or
    of an architecture or a type that is not read.
    """
    model = read_headers(path)
    architecture = model.values.get(ARCHITECTURE)
    if not isinstance(architecture, str):
        raise CheckpointError(
            f"{path.name} has {ARCHITECTURE} {architecture!r}; expected a name", hint=AGAIN
        )
    check_architecture(path.name, architecture)
    _Values(model, architecture).check()
    return model


class _Values:
    def __init__(self, model: GGUFModel, architecture: str) -> None:
        self.name, self.values, self.prefix = model.path.name, model.values, architecture
        self.shapes = {name: tensor.shape for name, (_, tensor) in model.tensors.items()}

    def check(self) -> None:
        if not self.shapes:
            raise CheckpointError(f"{self.name} holds no tensors; expected a model's", hint=AGAIN)
        layers = {int(match[1]) for name in self.shapes if (match := LAYER.match(name))}
        self.equal("block_count", len(layers), "the layers that it holds")
        if len(shape := self.shapes.get("token_embd.weight", ())) == 2:
            rows, columns = shape
            self.equal("embedding_length", columns, "the columns of its embedding")
            if f"{self.prefix}.vocab_size" in self.values:
                self.equal("vocab_size", rows, "the rows of its embedding")
            elif isinstance(tokens := self.values.get(TOKENS), Array) and tokens.length != rows:
                raise self.wrong(
                    TOKENS, f"of {tokens.length}", f"{rows}, the rows of its embedding"
                )
        for key, max_value in MAX_VALUES.items():
            self.up_to(key, max_value)
        for key in POSITIVE:
            value = self.values.get(f"{self.prefix}.{key}", 1.0)
            if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
                raise self.wrong(f"{self.prefix}.{key}", repr(value), "a number above 0")

    def equal(self, key: str, expected: int, what: str) -> None:
        value = self.values.get(f"{self.prefix}.{key}")
        if value != expected or isinstance(value, bool):
            raise self.wrong(f"{self.prefix}.{key}", repr(value), f"{expected}, {what}")

    def up_to(self, key: str, max_value: int) -> None:
        values = self.values.get(f"{self.prefix}.{key}", 1)
        min_value = 0 if key in MAY_BE_ZERO or isinstance(values, tuple) else 1
        for value in values if isinstance(values, tuple) else (values,):
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or not min_value <= value <= max_value
            ):
                raise self.wrong(f"{self.prefix}.{key}", repr(value), f"{min_value} to {max_value}")

    def wrong(self, key: str, actual: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.name} has {key} {actual}; expected {expected}", hint=AGAIN)
