"""Files of torch's, held to the checksums that it wrote."""

import zipfile
from pathlib import Path
from typing import Any

import torch


def read_torch_file(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU. Raises ValueError where a part is not as it was written,
    which `torch.load` does not tell, and what that raises."""
    if zipfile.is_zipfile(path):  # not as very old versions wrote it
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"{damaged} is damaged: its checksum is another one")
    return torch.load(path, map_location="cpu", weights_only=True)
