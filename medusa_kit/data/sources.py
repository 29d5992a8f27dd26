"""Items of files and data sets, numbered as an editor numbers lines, or from 1.

text_files.py reads JSON, text and CSV; tables.py other tables, and data sets by name or in a
folder, through `datasets`.
"""

from collections.abc import Iterator

from medusa_kit.data.tables import is_folder, read_data_set, read_table
from medusa_kit.data.text_files import FILE_KINDS, PIPE, READ, TABLES, Item, read_file, read_pipe
from medusa_kit.errors import DataError
from medusa_kit.files import near_file
from medusa_kit.paths import expanded


def read_items(source: str, limit: int | None = None, streaming: bool = False) -> Iterator[Item]:
    """Numbered items of a source, lazily. Raises what `readers.read_rows` raises for a source."""
    if not source.strip():
        raise DataError("the name of the data is empty, expected a file or a data set", hint=READ)
    if source == PIPE:
        return read_pipe()
    path = expanded(source)
    looks_like_path = path.suffix in FILE_KINDS or source.startswith((".", "/", "~"))
    if path.is_file():
        return read_table(path) if path.suffix in TABLES else read_file(path)
    if looks_like_path and not is_folder(source):
        raise DataError(
            f"no data file at {source}", hint=near_file(path, f"check the path; {READ}")
        )
    return read_data_set(source, limit, streaming)
