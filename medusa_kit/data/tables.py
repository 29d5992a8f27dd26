"""Rows of tables, and of data sets by name or in a folder, read through the package `datasets`.

A table gives every object the keys of all, with nothing where a row has none. So nothing in an
object is read as no key, but in columns of JSON and in folders of JSON files, which keep what was
written.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.names import offline_by
from medusa_kit.data.text_files import INSTALL, READ, TABLES, Item, read_file
from medusa_kit.errors import ConfigError, DataError
from medusa_kit.paths import expanded

OF_JSON_FILES = "datasets.packaged_modules.json.json"  # the module that reads them
# Of objects in which a null may mean something: what stands in these is shown to the model.
SHOWN_KEYS = ("tools", "arguments", "parameters")


def is_folder(source: str) -> bool:
    return expanded(source.partition(":")[0]).is_dir()


def read_table(path: Path) -> Iterator[Item]:
    if _is_empty_parquet(path):  # of which `datasets` says that a batch has no size
        return iter(())
    options: dict[str, Any] = {"data_files": str(path), "split": "train", "streaming": True}
    return _loaded(str(path), TABLES[path.suffix], None, options)


def _is_empty_parquet(path: Path) -> bool:
    try:
        import pyarrow.parquet

        return path.suffix == ".parquet" and not pyarrow.parquet.read_metadata(path).num_rows
    except (ImportError, OSError, ValueError):
        return False  # reading it says what is wrong


def read_data_set(source: str, limit: int | None, streaming: bool) -> Iterator[Item]:
    if streaming and limit is None:
        raise ConfigError(
            f"the data set {source!r} is streamed without a limit, so it might never end",
            hint="set data.limit, or a limit on this source",
        )
    name, _, split = source.partition(":")
    options = {"split": split or "train"} | ({"streaming": True} if streaming else {})
    if is_folder(source):
        folder = str(expanded(name)) if name.startswith("~") else name
        return _loaded(source, folder, None, options)
    parts = name.split("/")
    config = parts.pop() if len(parts) == 3 else None
    return _loaded(source, "/".join(parts) if config else name, config, options)


def _loaded(source: str, name: str, config: str | None, options: dict[str, Any]) -> Iterator[Item]:
    try:
        import datasets
    except ImportError as error:
        problem = "" if Path(source).is_file() else " is not a file, and reading it as a data set"
        raise DataError(
            f"{source!r}{problem} needs the package datasets",
            hint=f"{INSTALL}, or give a .jsonl, .json or .txt file",
        ) from error
    try:
        if is_folder(source) and (parts := _json_files(datasets, name)):
            yield from enumerate(_written(datasets, parts, options["split"]), start=1)
            return
        rows = datasets.load_dataset(name, config, **options)
        is_noted = False
        for number, row in enumerate(rows, start=1):  # a stream may fail at any row
            item, is_doubtful = as_given(row, getattr(rows, "features", None))
            if is_doubtful and not is_noted:
                _note_doubt(source, number)
                is_noted = True
            yield number, item
    except DataError:
        raise
    except Exception as error:  # datasets raises many kinds: missing, offline, wrong split
        if "OfflineMode" in str(error) and (by := offline_by()) is not None:
            raise DataError(
                f"there is no file {source!r} here, and the Hub, which may have a data set of that "
                f"name, is not asked, since {by} is set",
                hint=f"check the path, or unset {by}; {READ}",
            ) from error
        raise DataError(
            f"cannot load the data set {source!r}: {error}",
            hint="a name on the Hub is name[/config][:split], and a path of no file is read as "
            f"one; {READ}",
        ) from error


def _json_files(datasets: Any, folder: str) -> dict[str, list[Path]]:
    """The files of each split, where the folder is one of JSON files."""
    if not any(Path(folder).rglob("*json*")):
        return {}
    builder = datasets.load_dataset_builder(folder)
    config = builder.config
    if type(builder).__module__ != OF_JSON_FILES or getattr(config, "field", None) is not None:
        return {}
    return {
        str(split): [Path(file) for file in files] for split, files in config.data_files.items()
    }


def _written(datasets: Any, parts: Mapping[str, list[Path]], split: str) -> Iterator[Any]:
    """The rows of a split or of slices of some, as the files have them."""
    if split in parts:
        return _rows_of(parts[split])
    counts = {part: sum(1 for _ in _rows_of(files)) for part, files in parts.items()}
    slices = datasets.ReadInstruction.from_spec(split).to_absolute(counts)
    return itertools.chain.from_iterable(
        itertools.islice(_rows_of(parts[str(part.splitname)]), part.from_ or 0, part.to)
        for part in slices
    )


def _rows_of(files: list[Path]) -> Iterator[Any]:
    return (item for file in files for _, item in read_file(file))


def as_given(value: Any, feature: Any, is_shown: bool = False) -> tuple[Any, bool]:
    """(the value without keys that a table filled in, whether one of them may have been null in a
    tool or a call). `feature`: its type in `datasets`."""
    if type(feature).__name__ == "Json":
        return value, False
    if isinstance(value, dict):
        kinds = feature if isinstance(feature, Mapping) else {}
        filled = is_shown and None in value.values()
        given = {key: as_given(item, kinds.get(key), is_shown or key in SHOWN_KEYS)
                 for key, item in value.items() if item is not None}  # fmt: skip
        doubtful = filled or any(doubt for _, doubt in given.values())
        return {key: item for key, (item, _) in given.items()}, doubtful
    if isinstance(value, list):
        kind = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        items = [as_given(item, kind, is_shown) for item in value]
        return [item for item, _ in items], any(doubt for _, doubt in items)
    return value, False


@functools.cache  # a source may be read more than once
def _note_doubt(source: str, number: int) -> None:
    console.note(
        f"{source}: objects in tools and calls have the keys of all rows, with null where a row "
        f"has none (the first is row {number}); these keys are left out, real nulls among them. "
        "JSON lines keep them"
    )
