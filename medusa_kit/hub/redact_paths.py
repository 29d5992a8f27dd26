"""Texts to be published: paths of this machine become bare names."""

import re
from pathlib import Path, PureWindowsPath
from typing import Any

# A path inside a sentence: from a blank, quote or bracket to the next.
_INNER = re.compile(r"""(?<=[\s'"(=])(?:~|\.{1,2})?/(?:[^\s'"(),;]*/)?([^\s'"(),;/]+)""")


def is_local(text: str) -> bool:
    """Whether `text` is a path of this machine (a Hub id or a file's bare name is not)."""
    absolute = text.startswith(("/", "~")) or PureWindowsPath(text).is_absolute()
    return absolute or text.startswith(("./", "../"))


def redact_paths(value: Any) -> Any:
    """Return the JSON value with every local path in keys and values cut to its last part."""
    if isinstance(value, dict):
        return {redact_paths(key): redact_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if is_local(value) and "\n" not in value:
        name = PureWindowsPath(value).name if "\\" in value else Path(value).name
        return name or value
    return _INNER.sub(r"\1", value)
