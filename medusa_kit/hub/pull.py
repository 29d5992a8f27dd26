"""Pull: a repository's heads in a local folder, complete or not at all.

Files are collected in a hidden folder beside the destination, named after the commit, with which
another run goes on. It is renamed once every file is there and large ones have the right digest. A
record in the folder lists what a pull put there. `force` replaces those files and nothing else.
"""

import glob
import hashlib
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from medusa_kit import console
from medusa_kit.base.hub_client import HubName, with_retries
from medusa_kit.errors import CheckpointError, HubError, UsageError
from medusa_kit.files import atomic_write, file_digest, link_target, parse_json, write_json
from medusa_kit.heads.checkpoint import CONFIG_NAME, read_config
from medusa_kit.paths import expanded

PULLED = ("*.json", "*.safetensors", "*.npz", "*.yaml", "*.md", "*.png")
RECORD = ".medusa-kit-pull"  # JSON: repository, commit, and the digest of each file
DIGEST_LENGTH = 12  # of repository and commit, in the name of the hidden folder
SHOWN = 5  # files named in a message


def pull(name: HubName, destination: Path | None = None, force: bool = False) -> Path:
    """The folder that holds the heads now; `force` replaces one that an earlier pull made.

    Raises HubError (refused, not reachable, cut off: run it again), CheckpointError (a repository
    without heads of ours), UsageError (a destination that is taken; with `force` one that holds
    anything but what a pull put there).
    """
    target = expanded(destination or name.repository.rpartition("/")[2])
    _check_free(target, force)
    from huggingface_hub import HfApi

    api = HfApi(library_name="medusa-kit")
    what = f"cannot pull {name}"
    info = with_retries(
        what,
        name,
        lambda: api.model_info(name.repository, revision=name.revision, files_metadata=True),
    )
    names = [sibling.rfilename for sibling in info.siblings or []]
    if CONFIG_NAME not in names:
        raise CheckpointError(
            f"{name} holds no heads: {CONFIG_NAME} is missing", hint="check the name"
        )
    digest = hashlib.sha256(f"{name.repository}@{info.sha}".encode()).hexdigest()[:DIGEST_LENGTH]
    resolved = link_target(target)  # `staging` is on the disk where the files will be
    staging = resolved.parent / f".{resolved.name}.{digest}.pull"
    _begin(staging, name, info.sha)
    _download(api, what, name, info, staging)
    _write_record(staging, name, info.sha)
    _check_free(target, force)  # something may have been written there during the download
    _finish(staging, resolved)
    console.note(f"{name.repository} at commit {info.sha}")
    return target


def _check_free(target: Path, force: bool) -> None:
    if target.is_file():
        raise UsageError(f"{target} is a file, expected a folder", hint="name another folder")
    try:
        resolved = link_target(target)
    except OSError as error:
        raise UsageError(
            f"{target} is no place to write to: {error.strerror}", hint="name another folder"
        ) from error
    if resolved.resolve() == Path.cwd():
        raise UsageError(f"{target} is the working folder", hint="name a folder to make")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise UsageError(
            f"{target} exists and is not empty",
            hint="name another folder, or replace what a pull put there with --force",
        )
    if others := _not_pulled(target):
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        raise UsageError(
            f"{target} holds what no pull put there, or what changed since: "
            f"{', '.join(others[:SHOWN])}{more}",
            hint="name another folder, or move these away: --force replaces only what a pull "
            "put there",
        )


def _not_pulled(target: Path) -> list[str]:
    """Names of files in the folder that differ from what the pull that made it wrote."""
    pulled = _recorded(target)
    if pulled is None:
        return sorted(path.name for path in target.iterdir())
    parents = {str(parent) for name in pulled for parent in PurePosixPath(name).parents}
    unknown = []
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target).as_posix()
        if path.is_symlink() or not path.is_dir():
            same = not path.is_symlink() and name in pulled and file_digest(path) == pulled[name]
            is_pulled = name == RECORD or same
        else:
            is_pulled = name in parents
        if not is_pulled:
            unknown.append(name)
    return unknown


def _recorded(folder: Path) -> dict[str, str] | None:
    """Digests of the files that a pull put there; None where no pull made the folder."""
    try:
        return dict(parse_json((folder / RECORD).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or none that a pull wrote
        return None


def _begin(staging: Path, name: HubName, commit: str) -> None:
    """Make the folder `staging` with its record, so that even an incomplete one says that a pull
    made it."""
    if _recorded(staging) is not None:
        return
    if staging.exists() and not (staging.is_dir() and not any(staging.iterdir())):
        raise UsageError(
            f"{staging}, where files are to gather, is there, and no pull made it",
            hint="move it away",
        )
    with atomic_write(staging) as temporary:
        temporary.mkdir()
        _write_record(temporary, name, commit)


def _download(api: Any, what: str, name: HubName, info: Any, staging: Path) -> None:
    # A commit's hash, not a branch: all files must be of the same commit.
    with_retries(what, name, lambda: api.hf_hub_download(
        name.repository, CONFIG_NAME, revision=info.sha, local_dir=staging))  # fmt: skip
    try:
        read_config(staging)
    except CheckpointError as error:
        shutil.rmtree(staging)
        hint = "fetch it with `hf download`; `medusa-kit convert` reads other tools' formats"
        raise CheckpointError(f"{name} holds no heads of ours", hint=hint) from error
    with_retries(what, name, lambda: api.snapshot_download(
        name.repository, revision=info.sha, local_dir=staging, allow_patterns=list(PULLED)
    ))  # fmt: skip
    for sibling in info.siblings:
        path = staging / sibling.rfilename
        if sibling.lfs is not None and path.is_file() and file_digest(path) != sibling.lfs.sha256:
            path.unlink()
            raise HubError(
                f"{what}: {sibling.rfilename} arrived damaged", hint="run the same command again"
            )


def _write_record(staging: Path, name: HubName, commit: str) -> None:
    shutil.rmtree(staging / ".cache", ignore_errors=True)  # the client's notes
    files = {path.relative_to(staging).as_posix(): file_digest(path)
             for path in sorted(staging.rglob("*")) if path.is_file()}  # fmt: skip
    files.pop(RECORD, None)  # of a pull that was interrupted here
    record = {"repository": name.repository, "commit": commit, "files": files}
    write_json(staging / RECORD, record)


def _finish(staging: Path, target: Path) -> None:
    with atomic_write(target) as temporary:
        staging.replace(temporary)
    digest = "[0-9a-f]" * DIGEST_LENGTH
    for older in target.parent.glob(f".{glob.escape(target.name)}.{digest}.pull"):
        if not older.is_symlink() and _recorded(older) is not None:
            shutil.rmtree(older, ignore_errors=True)
