"""GGUF files that have a name of their own here: the one that a package carries, and those that
`make model` (benchmarks/fetch_model/) brings into the cache folder.
"""

import glob
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from medusa_kit.background import in_background
from medusa_kit.base.gguf import embedded_gguf
from medusa_kit.base.gguf_files.parts import stem
from medusa_kit.base.names import model_path
from medusa_kit.errors import CheckpointError
from medusa_kit.settings.engine import EMBEDDED_NAME, FETCHED_NAMES
from medusa_kit.store.records import cache_folder, content_digest

FOLDER = "models"  # in the cache folder


@dataclass(frozen=True)
class FetchedModel:
    """A file of its authors', known by its contents. `base`: the model it was quantised from, on
    the Hub."""

    name: str
    base: str
    size: int  # bytes
    sha256: str

    @property
    def repository(self) -> str:
        """Where the authors offer it on the Hub."""
        return f"{self.base}-GGUF"

    @property
    def path(self) -> Path:
        """Where it lies on this machine, in a folder of its own with its licence."""
        return cache_folder() / FOLDER / self.name / f"{self.name}-q4_k_m.gguf"

    def is_whole(self, path: Path) -> bool:
        """Whether the file there is this one."""
        return path.is_file() and content_digest(path) == self.sha256


FETCHED_MODELS = {
    model.name: model
    for model in (
        FetchedModel(
            "qwen2.5-coder-1.5b-instruct",
            "Qwen/Qwen2.5-Coder-1.5B-Instruct",
            1_117_320_768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
        FetchedModel(
            "qwen2.5-coder-0.5b-instruct",
            "Qwen/Qwen2.5-Coder-0.5B-Instruct",
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
    )
}


def own_gguf(name: str) -> Path | None:
    """The file of this name; None for all other names, debug-tiny too, which is no file.

    Raises CheckpointError where it is not on this machine, or has other contents.
    """
    if name == EMBEDDED_NAME:
        return embedded_gguf()
    if (model := FETCHED_MODELS.get(name)) is None:
        return None
    if not model.path.is_file():
        raise CheckpointError(
            f"the model {name!r} is not on this machine: there is no file {model.path}",
            hint=f"{making(model)} fetches it from its authors; {making(model, 'FILE')} takes a "
            "file that you have",
        )
    if not model.is_whole(model.path):
        raise CheckpointError(
            f"{model.path} is not the model {name!r}: its SHA-256 is another",
            hint=f"{making(model)} fetches it again",
        )
    return model.path


def begin_digest(name: str) -> None:
    """Begin to make the digest of a base's GGUF file, in a thread. A large one takes as long as
    the libraries take to be imported; whoever asks for it then waits for the rest alone."""
    if (path := _gguf_file(name)) is not None:
        in_background(content_digest, path)


def prepare_first_start(name: str) -> None:
    """`begin_digest`. Where nothing is kept of the file, import meanwhile what transformers' models
    have in common: packing the file takes one."""
    begin_digest(name)
    path = _gguf_file(name)
    if path is not None and not any(cache_folder().glob(f"{glob.escape(stem(path))}-*")):
        with suppress(ImportError):  # whoever needs it tells
            import_module("transformers.modeling_utils")


def _gguf_file(name: str) -> Path | None:
    """Where the file of a base lies, as far as its name tells; None for other bases."""
    with suppress(CheckpointError):
        fetched = FETCHED_MODELS.get(name)
        path = model_path(name) if fetched is None else fetched.path
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None


def making(model: FetchedModel, file: str | None = None) -> str:
    """The command that brings a model here, in a clone of this project."""
    other = "" if model.name == FETCHED_NAMES[0] else f" MODEL={model.name}"
    return f"`make model{other}{f' MODEL_FILE={file}' if file else ''}`"
