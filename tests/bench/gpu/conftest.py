"""The bench that parts of the measurements on a GPU are run on."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.workbench import Workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    """A dry run's, on the CPU."""
    return Workbench(torch.device("cpu"), True, lambda name: {}, tmp_path)
