"""Which base the heads in a file of weights learned: it says so in its metadata, since it may be
copied without the config beside it."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from medusa_kit import console
from medusa_kit.base.origin import BASE, check_origin, compare
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.heads.config import CONFIG_NAME, HeadsConfig

HINT = f"copy it with the {CONFIG_NAME} of its own folder, or take heads trained on this base"


def metadata_of(config: HeadsConfig) -> dict[str, str]:
    """What a file of these heads' weights says of itself. One key: safetensors writes several in
    any order, and the same heads would be other bytes each time."""
    return {BASE: config.base_fingerprint}


def check_weights_base(
    path: Path, config: HeadsConfig, force: bool = False, tell: bool = True
) -> None:
    """Compare a file of weights with the config beside it. `force`: those of another base are used,
    with a note. `tell`: one line says where a file does not say of which base it is.

    Raises IncompatibleBaseError.
    """
    said, now = _said(path), {BASE: config.base_fingerprint}
    compared = compare(said, now)
    if force and compared.other:
        if tell:
            console.note(f"{path} was made with {compared.in_words()}")
    elif compared.other or (tell and config.base_config is not None):  # else the config is older
        check_origin(path, said, now, HINT, IncompatibleBaseError)


def _said(path: Path) -> dict[str, str]:
    """Empty for files that other code reports as missing or damaged."""
    if not path.is_file():  # a pipe could be read for ever
        return {}
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}
