"""Push: one commit with everything, so that a repository never holds half of two versions.

The client sends files first and the commit last. What has arrived is not sent again, neither by
another attempt nor by another run of the command. A lost reply does not lead to a second commit.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.fingerprint import Match, compare
from medusa_kit.base.hub_client import HubName, check_login, with_retries
from medusa_kit.errors import ConfigError, UsageError
from medusa_kit.files import parse_json
from medusa_kit.heads.checkpoint import CONFIG_NAME, FORMAT
from medusa_kit.heads.config import HeadsConfig
from medusa_kit.hub.folder import CARD_NAME, UploadFile, is_known

SAME = ("num_heads", "kind")  # and the base: what tells heads from other heads
HARMLESS = (".gitattributes", CARD_NAME)


def push(
    files: Sequence[UploadFile],
    name: HubName,
    config: HeadsConfig,
    *,
    private: bool = False,
    force: bool = False,
) -> str:
    """Upload `files` to the repository, made if missing; returns the commit's address.

    `name.revision` is a branch, made if missing. `force`: replace whatever else is there.
    Raises HubError; ConfigError for a repository that holds something else.
    """
    what = f"cannot push to {name.repository}"
    check_login(what, name)
    from huggingface_hub import HfApi

    api = HfApi(library_name="medusa-kit")
    info, branch_exists = _look(api, what, name)
    if info is not None:
        _check_private(name, info, private)
        if not force:
            _check_same(api, what, name, info, config)
    else:
        with_retries(what, name, lambda: api.create_repo(
            name.repository, private=private or None, exist_ok=True))  # fmt: skip
    branch = name.revision
    if branch is not None and not branch_exists:
        with_retries(what, name, lambda: api.create_branch(
            name.repository, branch=branch, exist_ok=True))  # fmt: skip
    commit = with_retries(what, name, lambda: _commit(api, name, files))
    if info is not None and commit.oid == info.sha:
        console.note("nothing to send: the repository has all of this")
    return str(commit.commit_url)


def _commit(api: Any, name: HubName, files: Sequence[UploadFile]) -> Any:
    """Try once to commit. The repository's files are listed anew: an earlier try may
    have arrived."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    operations: list[Any] = [
        CommitOperationAdd(
            path_in_repo=file.name,
            path_or_fileobj=str(file.content) if isinstance(file.content, Path) else file.content,
        )
        for file in files
    ]
    local_names = {file.name for file in files}
    remote_names = _names(api.model_info(name.repository, revision=name.revision))
    stale = [path for path in remote_names if is_known(path) and path not in local_names]
    if stale:
        console.note(f"removing from the repository what is no more here: {', '.join(stale)}")
    operations += [CommitOperationDelete(path_in_repo=path) for path in stale]
    return api.create_commit(
        name.repository,
        operations,
        commit_message="Heads and what was measured, by medusa-kit push",
        revision=name.revision,
    )


def _look(api: Any, what: str, name: HubName) -> tuple[Any, bool]:
    """Look up (the repository, None where there is none; whether it has the branch).

    A missing branch will begin as the main one, whose state is then returned.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def look() -> tuple[Any, bool]:
        try:
            try:
                return api.model_info(name.repository, revision=name.revision), True
            except RevisionNotFoundError:
                return api.model_info(name.repository), False
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return None, False

    return with_retries(what, name, look)


def _names(info: Any) -> list[str]:
    return [sibling.rfilename for sibling in info.siblings or []]


def _check_private(name: HubName, info: Any, private: bool) -> None:
    if private and info.private is False:
        raise UsageError(
            f"{name.repository} exists and is public; --private is for new repositories",
            hint="make it private in its settings on the Hub, or leave --private out",
        )


def _check_same(api: Any, what: str, name: HubName, info: Any, config: HeadsConfig) -> None:
    """Raises ConfigError where the repository holds anything but heads like these."""
    names = _names(info)
    others = [path for path in names if path not in HARMLESS]
    if not others:
        return
    hint = "choose another name, or push over it with --force"
    remote = _remote_config(api, what, name, info.sha) if CONFIG_NAME in names else {}
    if remote.get("format") != FORMAT:
        shown = ", ".join(others[:4])
        raise ConfigError(
            f"{name.repository} exists and holds no heads of ours but {shown}", hint=hint
        )
    local = config.as_dict()
    differing = [f"{key} {local.get(key)!r} ≠ {remote.get(key)!r}" for key in SAME
                 if local.get(key) != remote.get(key)]  # fmt: skip
    base, remote_base = config.base_fingerprint, remote.get("base_fingerprint")
    if compare(base, remote_base) not in (Match.SAME, Match.OLD):
        differing.append(f"base_fingerprint {base!r} ≠ {remote_base!r}")
    if differing:
        raise ConfigError(
            f"{name.repository} holds other heads; here ≠ there: {'; '.join(differing)}", hint=hint
        )


def _remote_config(api: Any, what: str, name: HubName, commit: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = with_retries(what, name, lambda: api.hf_hub_download(
            name.repository, CONFIG_NAME, revision=commit, local_dir=folder))  # fmt: skip
        try:
            config = parse_json(Path(path).read_text())
        except (UnicodeDecodeError, json.JSONDecodeError):
            return {}
    return config if isinstance(config, dict) else {}
