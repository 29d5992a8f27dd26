"""Results of checks at load, kept in the cache folder: a machine checks a model once.

A record names all that the result depends on. Only what passed is kept.
"""

import contextlib
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.processor import processor_name
from medusa_kit.base.remembered.folder import cache_folder
from medusa_kit.files import atomic_write, parse_json
from medusa_kit.version import __version__

SOURCES = ("embedded", "gguf", "folder", "hub")  # of models whose code is the library's
PACKAGE = Path(__file__).parents[2]
CHECKED_CODE = ("base", "infer")  # folders of the package


class CheckMemory:
    """The memory of one check. `depends_on`: what the result depends on beside machine and
    versions."""

    def __init__(self, **depends_on: Any) -> None:
        self._depends_on = json.loads(json.dumps({**_machine(), **depends_on}))
        digest = hashlib.sha256(json.dumps(self._depends_on).encode()).hexdigest()[:16]
        self._path = cache_folder() / "checks" / f"{digest}.json"

    def read(self) -> dict[str, Any] | None:
        """The figures of a check that passed; None where none is known."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = parse_json(self._path.read_bytes())
            if record["depends_on"] == self._depends_on:
                return dict(record["figures"])
        return None

    def write(self, **figures: Any) -> None:
        """Where that fails, the check is run again next time."""
        record = {"figures": figures, "depends_on": self._depends_on}
        with contextlib.suppress(OSError), atomic_write(self._path) as path:
            path.write_text(json.dumps(record, indent=2), encoding="utf-8")


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
    """Of the package's code that loads and decodes, the kernels' sources included."""
    digest = hashlib.sha256()
    for folder in CHECKED_CODE:
        for path in sorted((package / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()
