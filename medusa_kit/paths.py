"""Paths as people write them: the one place where `~` and relative ones are resolved."""

from pathlib import Path, PurePath

from medusa_kit.errors import ConfigError, half_pair

LONGEST = 255  # bytes of a name in a folder; the system raises OSError wherever it is looked up


def expanded(path: str | PurePath) -> Path:
    """The path with `~` written out. Raises ConfigError for the home of somebody unknown, and for a
    name that no file can have: one that is too long, or no text."""
    try:
        str(path).encode("utf-8", "surrogateescape")  # bytes that are no UTF-8 may be a name
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the path {str(path)!r} is no text: {half_pair(str(path))}", hint="check the path"
        ) from error
    if "\0" in str(path):
        raise ConfigError(
            f"the path {str(path)!r} holds a character of zero, which ends a name",
            hint="check the path",
        )
    if any(len(part.encode("utf-8", "surrogatepass")) > LONGEST for part in PurePath(path).parts):
        raise ConfigError(
            f"the name {str(path)[:40]!r}… of {len(str(path)):,} characters is too long for a file",
            hint="check the path",
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # `~name`, where nobody has that name
        raise ConfigError(
            f"{str(path)!r} begins with a home folder that is not known here",
            hint="write the whole path",
        ) from error


def written(path: str | PurePath) -> Path:
    """The path of what is to be written, which may not be there yet; `..` is taken out, since the
    path is kept in records."""
    place = expanded(path)
    return place.resolve() if ".." in place.parts else place


def whole(path: str | PurePath) -> Path:
    """The path from the root on, whatever the working folder is later. Links stay as they are."""
    return expanded(path).absolute()


def beside(name: str, *folders: Path) -> str:
    """What a name stands for that may be a path: the whole path where it exists, in one of
    `folders` or else in the working folder, and where it begins with `~`; else the name, such as
    one on the Hub. Of FOLDER:SPLIT the folder is looked up."""
    if not name:
        return name
    path = expanded(name)
    found = next((one for one in (*(f / path for f in folders), path) if one.exists()), None)
    if found is not None:
        return str(found.resolve())
    folder, colon, split = name.partition(":")
    if colon and (there := beside(folder, *folders)) != folder:
        return f"{there}:{split}"
    return str(path) if name.startswith("~") else name
