"""Pull: a repository's heads as a folder of one's own, whole or not at all.

Files gather in a hidden folder beside the destination, named after the commit: another run goes on
with it. The folder takes its name once every file is there and large ones have the right digest.
"""

import glob
import hashlib
import shutil
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.errors import CheckpointError, HubError, UsageError
from medusa_kit.files import atomic_write, file_digest
from medusa_kit.heads.checkpoint import CONFIG_NAME, read_config
from medusa_kit.hub_client import HubName, talk

PULLED = ("*.json", "*.safetensors", "*.npz", "*.yaml", "*.md", "*.png")


def pull(name: HubName, destination: Path | None = None, force: bool = False) -> Path:
    """The folder that holds the heads now; `force` replaces one that is there.

    Raises HubError (refused, not reachable, cut off: run it again), CheckpointError (a repository
    without heads of ours), UsageError (a destination that is taken).
    """
    target = destination or Path(name.repository.rpartition("/")[2])
    _check_free(target, force)
    from huggingface_hub import HfApi

    api = HfApi(library_name="medusa-kit")
    what = f"cannot pull {name}"
    info = talk(
        what,
        name,
        lambda: api.model_info(name.repository, revision=name.revision, files_metadata=True),
    )
    names = [sibling.rfilename for sibling in info.siblings or []]
    if CONFIG_NAME not in names:
        raise CheckpointError(
            f"{name} holds no heads: {CONFIG_NAME} is missing", hint="check the name"
        )
    digest = hashlib.sha256(f"{name.repository}@{info.sha}".encode()).hexdigest()[:12]
    gathering = target.parent / f".{target.name}.{digest}.pull"
    _download(api, what, name, info, gathering)
    _finish(gathering, target)
    console.note(f"{name.repository} at commit {info.sha}")
    return target


def _check_free(target: Path, force: bool) -> None:
    if target.is_file():
        raise UsageError(f"{target} is a file, expected a folder", hint="name another folder")
    if target.resolve() == Path.cwd():
        raise UsageError(f"{target} is the working folder", hint="name a folder to make")
    if not force and target.is_dir() and any(target.iterdir()):
        raise UsageError(
            f"{target} exists and is not empty",
            hint="name another folder, or replace it with --force",
        )


def _download(api: Any, what: str, name: HubName, info: Any, gathering: Path) -> None:
    # A commit's hash, not a branch: what is fetched later belongs to what was fetched before.
    talk(what, name, lambda: api.hf_hub_download(
        name.repository, CONFIG_NAME, revision=info.sha, local_dir=gathering))  # fmt: skip
    try:
        read_config(gathering)
    except CheckpointError as error:
        shutil.rmtree(gathering)
        hint = "fetch it with `hf download`; `medusa-kit convert` reads other tools' formats"
        raise CheckpointError(f"{name} holds no heads of ours", hint=hint) from error
    talk(what, name, lambda: api.snapshot_download(
        name.repository, revision=info.sha, local_dir=gathering, allow_patterns=list(PULLED)
    ))  # fmt: skip
    for sibling in info.siblings:
        path = gathering / sibling.rfilename
        if sibling.lfs is not None and path.is_file() and file_digest(path) != sibling.lfs.sha256:
            path.unlink()
            raise HubError(
                f"{what}: {sibling.rfilename} arrived damaged", hint="run the same command again"
            )


def _finish(gathering: Path, target: Path) -> None:
    shutil.rmtree(gathering / ".cache", ignore_errors=True)  # the client's notes
    with atomic_write(target) as temporary:
        gathering.replace(temporary)
    for older in target.parent.glob(f".{glob.escape(target.name)}.*.pull"):
        shutil.rmtree(older, ignore_errors=True)
