"""Provenance of a run, written beside every checkpoint and result: versions, git state, recipe."""

import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.version import __version__

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "datasets")


def provenance(
    recipe: TrainRecipe, origin: dict[str, Any], ran: dict[str, Any] | None = None
) -> str:
    """Versions, commit and recipe as JSON text. `origin`: as `origin_here` has it. `ran`: how far
    the training had come."""
    record = {**origin, "recipe": recipe.model_dump()}
    return json.dumps(record if ran is None else {**record, "ran": ran}, indent=2)


def origin_here() -> dict[str, Any]:
    """Versions and commit of what runs here now."""
    return {"versions": versions(), "git": git_state()}


def versions() -> dict[str, str]:
    """Versions of medusa-kit and of the packages that it trains with, where installed."""
    found = {"medusa_kit": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the repository around `folder` (by default the working directory), and whether
    files differ from it."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed_files": bool(_git(folder, "status", "--porcelain"))}


def _git(folder: Path | None, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
