"""Checkpoints of runs whose files a test has changed."""

import json
from pathlib import Path

from medusa_kit.train.run.checkpoint_files import FILES, digests


def note_files(folder: Path) -> None:
    """As if a run had written the files as they are now."""
    path = folder / "progress.json"
    progress = json.loads(path.read_text()) | {FILES: digests(folder)}
    path.write_text(json.dumps(progress))
