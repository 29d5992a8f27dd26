"""The files of weights and random states in a checkpoint: progress.json holds a digest of each, so
that those of two checkpoints, or of two runs, are never mixed.

A digest is made of the checksums that torch writes into a file, so it takes no time. Whether its
parts have these checksums is compared where it is read (torch_file.py).
"""

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_kit.errors import CheckpointError
from medusa_kit.files import file_digest

FILES = "files"  # in progress.json: digests by name
HINT = "put back the checkpoint as it was, or add --fresh to start over"


def digests(folder: Path) -> dict[str, str]:
    """The digest of each file that torch wrote into `folder`, by its path there."""
    paths = sorted(folder.rglob("*.pt"))  # of DeepSpeed in a folder of their own
    return {path.relative_to(folder).as_posix(): _digest(path) for path in paths}


def check_files(folder: Path, progress: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a file that is not the one beside which `progress` was written.
    Checkpoints of earlier versions do not say which these were."""
    for name, expected in (progress.get(FILES) or {}).items():
        path = folder / name
        try:
            found = _digest(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", hint=HINT) from error
        if found != expected:
            raise CheckpointError(
                f"{path} cannot be read: it is damaged, or of another checkpoint (its digest is "
                f"{found}; expected {expected})",
                hint=HINT,
            )


def _digest(path: Path) -> str:
    if not zipfile.is_zipfile(path):
        return file_digest(path)[:32]
    with zipfile.ZipFile(path) as archive:
        parts = [f"{part.filename} {part.file_size} {part.CRC}" for part in archive.infolist()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
