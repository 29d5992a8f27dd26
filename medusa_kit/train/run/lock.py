"""One training at a time in a folder."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from medusa_kit.errors import ConfigError
from medusa_kit.files import link_target
from medusa_kit.one_owner import one_owner

LOCK = ".training.lock"  # empty
HOLDER = ".training.json"  # who trains here


@contextlib.contextmanager
def only_training_in(folder: Path) -> Iterator[None]:
    """Raises ConfigError, naming who trains there, when somebody does; OSError as mkdir does.

    A folder that was made for the lock and in which nothing else was written is removed again.
    """
    folder = link_target(folder)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)

    def refusal(who: str) -> ConfigError:
        return ConfigError(
            f"{folder} is in use by another training{who}",
            hint="wait for its end or stop it, or choose another output_dir",
        )

    def unused() -> bool:
        return made and [path.name for path in folder.iterdir()] == [LOCK]

    try:
        with one_owner(folder / LOCK, folder / HOLDER, refusal, unused):
            yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it holds a run, or somebody else has begun
                folder.rmdir()
