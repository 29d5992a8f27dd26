"""The device of a dry run: the tests' stand-in for CUDA, which computes on the host and fails where
CUDA would."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"


def installed() -> AbstractContextManager[Any]:
    """A context in which torch sees one CUDA device."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    from support import cuda_stand_in

    return cuda_stand_in.installed()
