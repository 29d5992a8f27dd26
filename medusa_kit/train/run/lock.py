"""One training at a time in a folder."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from medusa_kit.errors import ConfigError
from medusa_kit.files import link_target
from medusa_kit.process_lock import process_lock

LOCK = ".training.lock"  # empty
HOLDER = ".training.json"  # the process that trains here


@contextlib.contextmanager
def only_training_in(folder: Path) -> Iterator[None]:
    """Raises ConfigError, naming the process, where another one trains; OSError as mkdir does.

    A folder that was made for the lock is removed again if nothing else was written into it.
    """
    folder = link_target(folder)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)

    def refusal(who: str) -> ConfigError:
        return ConfigError(
            f"{folder} is in use by another training{who}",
            hint="wait until it ends, stop it, or choose another output_dir",
        )

    def unused() -> bool:
        return made and [path.name for path in folder.iterdir()] == [LOCK]

    try:
        with process_lock(folder / LOCK, folder / HOLDER, refusal, unused):
            yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it holds a run, or another process has begun
                folder.rmdir()
