"""Where what is found for heads lies: the tree, and what it was found from.

That is beside the heads, unless their folder is no place to write to: a package's, a snapshot of
the Hub, or one that this user may not change. Then it lies in the cache folder, by the contents of
the heads, so that all who load the same heads find it, and those of another release do not.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from medusa_kit import console
from medusa_kit.files import write_text
from medusa_kit.store.builds import ORIGIN
from medusa_kit.store.records import cache_folder, content_digest, mark_used, place_of

FOUND = "heads"  # in the cache folder
GATHERED = ".calibration"  # in a folder of results: answers of a search that is not finished
PACKAGES = ("site-packages", "dist-packages")
WEIGHTS = (".safetensors", ".pt", ".bin")
MAKERS = ("medusa_kit", "assets")  # folders of heads that come with the kit, in a clone too


def results_folder(heads: Path) -> Path:
    """The folder for what is found for the heads in a folder. Raises OSError."""
    if _is_the_users(heads):
        return heads
    folder = Path(heads).resolve()
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json" or path.suffix in WEIGHTS:
            digest.update(f"{path.name} {content_digest(path)}\n".encode())
    return cache_folder() / FOUND / f"{folder.name}-{digest.hexdigest()[:16]}"


def found_beside(heads: Path, name: str) -> Path:
    """The file of this name that was found for the heads in a folder, which need not be there."""
    with contextlib.suppress(OSError):
        if not _is_the_users(heads) and _has_any(Path(heads).resolve().name):
            kept = results_folder(heads)
            if (kept / name).is_file():
                mark_used(kept)
                return kept / name
    return heads / name


@contextlib.contextmanager
def results_of(heads: Path, output: Path | None = None) -> Iterator[Path]:
    """The folder for what one search finds for heads, or `output`, made if missing: what is in the
    cache folder is not cleared meanwhile. Raises OSError where it cannot be written, Timeout where
    another search is at it: each would take the other's answers away."""
    folder = output or results_folder(heads)
    folder.mkdir(parents=True, exist_ok=True)
    lock, stays = _lock_of(heads, folder, output), output is None and folder != heads
    if stays:
        console.note(
            f"{heads} is no place to write to: what is found for these heads goes to {folder}"
        )
        write_text(folder / ORIGIN, json.dumps({"place": place_of(Path(heads).resolve())}))
    with contextlib.suppress(NotImplementedError):  # file systems without locks
        lock.acquire(timeout=0)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # Windows keeps a file that is open
            if lock.is_locked and not stays:
                Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def is_searched(heads: Path, output: Path | None = None) -> bool:
    """Whether a search writes to the folder for what is found for heads, or to `output`, as far as
    can be told without writing there."""
    with contextlib.suppress(OSError, NotImplementedError):
        lock = _lock_of(heads, output or results_folder(heads), output)
        if Path(lock.lock_file).is_file():
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return True
            lock.release()
    return False


def _lock_of(heads: Path, folder: Path, output: Path | None) -> FileLock:
    """Of a folder in the cache folder it is that which clearing asks for, and removes."""
    if output is None and folder != heads:
        return FileLock(folder.with_name(f".{folder.name}.lock"))
    return FileLock(folder / f"{GATHERED}.lock")


def _is_the_users(heads: Path) -> bool:
    parts = Path(heads).resolve().parts
    snapshot = any(
        name == "snapshots" and before.startswith("models--")
        for before, name in itertools.pairwise(parts)
    )
    makers = any(parts[i : i + len(MAKERS)] == MAKERS for i in range(len(parts)))
    if snapshot or makers or {*PACKAGES} & {*parts}:
        return False
    return not Path(heads).is_dir() or os.access(heads, os.W_OK)


def _has_any(name: str) -> bool:
    """Whether something was found for heads in a folder of this name: else nothing is read of
    them."""
    return any((cache_folder() / FOUND).glob(f"{glob.escape(name)}-*"))
