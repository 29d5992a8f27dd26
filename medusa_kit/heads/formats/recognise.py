"""Recognises a folder's format by its tensors' names, and compares its config with them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.errors import CheckpointError
from medusa_kit.heads.formats import numbered, prefixed, trt_llm, vllm
from medusa_kit.heads.formats.files import CONFIG_NAME, TensorFiles, read_json
from medusa_kit.heads.formats.layout import UNMERGED, Layout, unexpected
from medusa_kit.heads.formats.neutral import ForeignHeads, without_empty_heads

ADAPTER_CONFIG = "adapter_config.json"
KIT_BLOCK = re.compile(r"blocks\.\d+\.\d+\.linear\.(weight|bias)")
UNKNOWN_NAMES = ("", "N/A", "n/a")


@dataclass(frozen=True)
class Reader:
    names: str
    layout: Layout
    read: Callable[[TensorFiles, dict[str, Any], frozenset[str]], ForeignHeads]


READERS = (
    Reader("FasterDecoding, TGI or LoRAX", numbered.LAYOUT, numbered.read),
    Reader("merged or MLC-LLM", prefixed.MERGED_LAYOUT, prefixed.read_merged),
    Reader("Model Optimizer", prefixed.MODELOPT_LAYOUT, prefixed.read_modelopt),
    Reader("vLLM", vllm.LAYOUT, vllm.read),
    Reader("TensorRT-LLM", trt_llm.LAYOUT, trt_llm.read),
)


def read_foreign(folder: Path, quiet: bool = False, pickles: bool = True) -> ForeignHeads | None:
    """The heads in `folder`; None where it holds no weights, or those of medusa-kit.

    Only the heads' own tensors are read, whatever else is in the files. `quiet`: without notes on
    where the config differs from the tensors. `pickles`: whether such files are opened.
    Raises CheckpointError for an unknown format, a file that is cut off, and tensors that are
    unexpected, missing or of a wrong shape.
    """
    folder = Path(folder)
    files = TensorFiles(folder, pickles)
    if not files.names or any(KIT_BLOCK.fullmatch(name) for name in files.names):
        return None
    reader = _reader_for(files)
    config = read_json(folder / CONFIG_NAME)
    extras = _adapter_names(folder, files)
    heads = without_empty_heads(reader.read(files, config, extras))
    heads = replace(
        heads,
        base_name=heads.base_name or _base_name(config),
        adapter={name: files.get(name) for name in sorted(extras)},
    )
    if not quiet:
        _warn_about_sizes(heads, config, folder / CONFIG_NAME)
    return heads


def _reader_for(files: TensorFiles) -> Reader:
    readers = [
        reader for reader in READERS if any(reader.layout.marks(name) for name in files.names)
    ]
    if len(readers) == 1:
        return readers[0]
    if readers:
        raise CheckpointError(
            f"{files.folder} holds heads of several formats: {', '.join(r.names for r in readers)}",
            hint="keep the files of one of them in the folder",
        )
    if unmerged := next((name for name in files.names if UNMERGED in name), None):
        raise unexpected(unmerged)
    seen = ", ".join(sorted(files.names)[:4])
    raise CheckpointError(
        f"{files.folder} holds no Medusa heads of a known format: its tensors are {seen}, …",
        hint="formats are listed in docs/formats.md",
    )


def _adapter_names(folder: Path, files: TensorFiles) -> frozenset[str]:
    """The adapter's tensors: for LoRAX the adapter trained with the heads is in their folder."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return frozenset()
    return frozenset(name for name in files.names if ".lora_" in name)


def _base_name(config: dict[str, Any]) -> str | None:
    name = config.get("base_model_name_or_path")
    return name if isinstance(name, str) and name not in UNKNOWN_NAMES else None


def _warn_about_sizes(heads: ForeignHeads, config: dict[str, Any], path: Path) -> None:
    """Warns where the config states other sizes than the tensors have; the tensors decide."""
    matrices = heads.matrix_list()
    rows = len(matrices[0]) if matrices and heads.token_map_R is None else None
    actual = {
        "heads": heads.num_heads,
        "layers": heads.num_blocks,
        "hidden_size": heads.hidden_size,
        "vocab_size": rows,
    }
    for size, key, stated in _stated_sizes(heads, config):
        if actual[size] is not None and stated != actual[size]:
            console.warn(
                f"{path}: {key} is {stated!r}, but by the file's tensors it is {actual[size]}: "
                f"{actual[size]} is used"
            )


def _stated_sizes(heads: ForeignHeads, config: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(size, key, value) of every size in the config that the tensors show too."""
    nested = [config.get(key) for key in ("medusa", "medusa_config")]
    sections = [config, *(section for section in nested if isinstance(section, dict))]
    for section in sections:
        for key, value in section.items():
            if value is None:
                continue
            for size in ("heads", "layers"):
                # vLLM takes any such key for the number of heads, even one about the base.
                if heads.format == "vllm":
                    matches = "num" in key and size in key
                else:
                    matches = key in (f"medusa_num_{size}", f"num_medusa_{size}")
                if matches:
                    yield size, key, value
            if key in ("hidden_size", "vocab_size"):
                yield key, key, value
