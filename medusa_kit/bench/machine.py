"""The machine and the versions that figures were measured with."""

import platform
from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.processor import processor_name
from medusa_kit.engine.engine import Engine
from medusa_kit.files import file_digest
from medusa_kit.heads.checkpoint import WEIGHTS_NAME
from medusa_kit.version import __version__


def describe_setup(engine: Engine) -> dict[str, Any]:
    """Machine, versions and what runs the steps of this engine."""
    import transformers

    return {
        "steps_run_by": engine.steps_run_by,
        "processor": processor_name(engine.base.device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "medusa_kit": __version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def heads_digest(engine: Engine) -> str | None:
    """SHA-256 of the heads' weights, which identifies them in reports; None: no file."""
    if engine.heads_source is None:
        return None
    path = Path(engine.heads_source) / WEIGHTS_NAME
    return file_digest(path) if path.is_file() else None
