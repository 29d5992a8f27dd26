"""TensorRT-LLM's engine checkpoint: `medusa_heads.0.medusa_layers.0.linear.weight`.

It holds base and heads, split by rank, and its names are read here. TensorRT-LLM makes it from a
checkpoint with FasterDecoding's names, which is what `--to trt-llm` writes (numbered.py).
"""

import re
from typing import Any

from medusa_kit.heads.formats.files import TensorFiles
from medusa_kit.heads.formats.layout import Layout, read_blocks, read_matrices, sort_names
from medusa_kit.heads.formats.neutral import ForeignHeads

PREFIX = "medusa_heads."
LAYOUT = Layout(
    re.compile(
        r"medusa_heads\.(?P<head>\d+)\.medusa_layers\.(?P<block>\d+)"
        r"\.linear\.(?P<kind>weight|bias)"
    ),
    re.compile(r"medusa_heads\.(?P<head>\d+)\.lm_head\.weight"),
    lambda name: name.startswith(PREFIX),
)


def read(files: TensorFiles, config: dict[str, Any], extras: frozenset[str]) -> ForeignHeads:
    """The heads of an engine checkpoint of one rank: files of several ranks hold the same names and
    are refused before this."""
    names = sort_names(LAYOUT, files.names, extras)
    blocks = read_blocks(files, names)
    return ForeignHeads("trt-llm", blocks, read_matrices(files, names, blocks))
