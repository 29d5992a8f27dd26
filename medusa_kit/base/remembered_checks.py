"""Results of checks at load, kept in the cache folder: a machine checks a model once.

A record names all that the result depends on. Only what passed is kept.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.processor import processor_name
from medusa_kit.store.records import Record, short_digest
from medusa_kit.version import __version__

SOURCES = ("embedded", "gguf", "folder", "hub")  # of models whose code is the library's
PACKAGE = Path(__file__).parents[1]
CHECKED_CODE = ("base", "infer")  # folders of the package


def record_of_check(about: str, **depends_on: Any) -> Record:
    """The record of one check. `about`: the model's name; `depends_on`: what the result depends on
    beside machine and versions."""
    everything = {**_machine(), **depends_on}
    name = short_digest(json.dumps(everything))
    return Record("checks", name, {"depends_on": everything}, about)


def _machine() -> dict[str, Any]:
    import transformers

    return {
        "version": __version__,
        "code": code_digest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor_name(torch.device("cpu")),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


@functools.cache
def code_digest(package: Path = PACKAGE) -> str:
    """The digest of the package's code that loads and decodes, the kernels' sources included."""
    digest = hashlib.sha256()
    for folder in CHECKED_CODE:
        for path in sorted((package / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()
