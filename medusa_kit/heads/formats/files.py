"""The tensors of a checkpoint folder, by name; each is read only when needed.

Pickles (`.pt`, `.bin`) are opened only if they hold plain tensors: no code in them is run.
"""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from medusa_kit.base.faults.finite import check_numbers
from medusa_kit.base.hub_client import heads_folder
from medusa_kit.errors import CheckpointError, unreadable
from medusa_kit.files import parse_json

CONFIG_NAME = "config.json"
FD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# The trainer's files, not the model's; LoRAX ignores these names too.
NO_WEIGHTS = ("arguments", "args", "training", "optimizer", "scheduler")
SAFE_WAY = (
    "if you trust it, load it, write its tensors with safetensors.torch.save_file and convert "
    "that file"
)


class TensorFiles:
    """The names of all tensors in a folder, and the file that each is in. `pickles`: whether files
    of that kind are opened."""

    def __init__(self, folder: Path, pickles: bool = True) -> None:
        self.folder, self._may_open = Path(folder), pickles
        self._pickles: dict[Path, dict[str, Tensor]] = {}
        self.paths: dict[str, Path] = {}
        self.files: list[Path] = []
        index = find_index(self.folder)
        own_files = [folder / name for name in FD_FILES if (folder / name).is_file()]
        if index is not None and own_files:  # heads in a file of their own beside the base's shards
            self._take_file(own_files[0])
        elif index is not None:
            self._take_index(index)
        else:
            for path in weight_files(self.folder):
                self._take_file(path)

    @property
    def names(self) -> list[str]:
        return list(self.paths)

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU. Raises CheckpointError where the file is cut off or lacks it, and
        for NaN and infinite numbers."""
        tensor = self._read(name)
        check_numbers(self.paths[name], {name: tensor})
        return tensor

    def _read(self, name: str) -> Tensor:
        path = self.paths[name]
        if path.suffix != ".safetensors":
            if name not in self._pickle(path):
                raise CheckpointError(f"{path} lacks {name}, which its index says it has")
            return self._pickle(path)[name]
        try:
            with safe_open(path, framework="pt") as opened:
                return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error

    def _take_index(self, index: Path) -> None:
        self.paths = {name: self.folder / file for name, file in read_index(index).items()}
        self.files = sorted(set(self.paths.values()))
        if outside := [path for path in self.files if path.parent != self.folder]:
            raise CheckpointError(f"{index} names a file outside its folder: {outside[0]}")

    def _take_file(self, path: Path) -> None:
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt") as opened:
                    names = list(opened.keys())
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error
        else:
            names = list(self._pickle(path))
        for name in names:
            if name in self.paths:
                raise CheckpointError(
                    f"{name} is both in {self.paths[name].name} and in {path.name}",
                    hint="keep one of the files; tensors that are split over the ranks of an "
                    "engine have to be joined first",
                )
            self.paths[name] = path
        self.files.append(path)

    def _pickle(self, path: Path) -> dict[str, Tensor]:
        if not self._may_open:
            raise CheckpointError(
                f"{path} is a pickle; expected safetensors",
                hint="`medusa-kit convert` writes these heads as safetensors",
            )
        if path not in self._pickles:
            self._pickles[path] = read_pickle(path)
        return self._pickles[path]


def find_index(folder: Path) -> Path | None:
    return next((folder / name for name in INDEXES if (folder / name).is_file()), None)


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, from an index of weights. Raises CheckpointError."""
    try:
        weight_map = parse_json(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of weights: {error}") from error


def hub_patterns(folder: Path) -> list[str]:
    """Which weight files of a repository to fetch, its JSON files being in `folder` already."""
    index = find_index(folder)
    if index is None:
        return ["*.safetensors", FD_FILES[1]]
    in_model = ("medusa_head.", "medusa_heads.")
    shards = {file for name, file in read_index(index).items() if name.startswith(in_model)}
    # Weight files that are not shards of the index are beside them.
    return sorted(shards) or [*FD_FILES, "heads.safetensors"]


def local_heads_folder(name: str | Path) -> Path:
    """The folder of heads of any format. A name on the Hub is fetched; of a model that holds heads,
    only the shards with the heads. Raises HubError.
    """
    return heads_folder(name, hub_patterns)


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder without an index, safetensors before pickles."""
    safetensors = sorted(
        path
        for path in folder.glob("*.safetensors")
        if not any(word in path.name for word in NO_WEIGHTS)
    )
    if safetensors:
        return safetensors
    if (folder / FD_FILES[1]).is_file():
        return [folder / FD_FILES[1]]
    return sorted(
        path
        for pattern in ("*.bin", "*.pt")
        for path in folder.glob(pattern)
        if not any(word in path.name for word in NO_WEIGHTS)
    )


def read_pickle(path: Path) -> dict[str, Tensor]:
    """A state dict of plain tensors. Raises CheckpointError for anything else."""
    try:
        # Memory-mapped, so that only the heads of a whole model are read.
        loaded = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is a pickle with more than plain tensors; it is not opened: it could run "
            "any code",
            hint=SAFE_WAY,
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from error
    is_plain = isinstance(loaded, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()
    )
    if not is_plain:
        raise CheckpointError(f"{path} is not a state dict of tensors", hint=SAFE_WAY)
    return dict(loaded)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise unreadable(error)(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, expected an object")
    return content


def whole_number(config: dict[str, Any], key: str) -> int | None:
    """A whole number of a config, None without the key. Raises CheckpointError for other values."""
    value = config.get(key)
    if value is None or type(value) is int:
        return value
    raise CheckpointError(f"the config's {key} is {value!r}, expected a whole number")


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    if not path.is_file():
        return CheckpointError(f"{path} is missing", hint="the folder is incomplete: copy it again")
    return unreadable(error)(
        f"{path} cannot be read: {error}", hint="the file is cut off or damaged: copy it again"
    )
