"""An engine in each precision around a tiny GGUF file whose weights are multiplied as integers."""

from pathlib import Path
from typing import Any

import pytest

from medusa_kit.base.model import BaseModel
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.settings.engine import allowed
from support.gguf.tiny_gguf import write_gguf
from support.small_engines import build_engine, random_heads

FLOAT32, *ROUNDED = allowed("activations")
NATIVE = kernels.load_library()
needs_integers = pytest.mark.skipif(
    NATIVE is None or not kernels.has_integers(NATIVE), reason="no integers are multiplied here"
)


def quantised_base(folder: Path) -> BaseModel:
    path = folder / "tiny.gguf"
    return base_for_decoding(
        str(path if path.is_file() else write_gguf(path, kind="Q8_0")), device="cpu"
    )


def rounded_engine(base: BaseModel, activations: str, **options: Any) -> Engine:
    return build_engine(
        base, activations=activations, **{"heads": random_heads(base, 2), **options}
    )
