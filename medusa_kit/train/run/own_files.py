"""Which files of an output folder are a run's, so that nothing else is ever replaced.

A run that begins leaves its mark, with the digest of the recipe that it writes. Of runs of earlier
versions, which left none, other files tell: run.json, a checkpoint, or the lock beside a recipe as
it was written.
"""

import hashlib
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import yaml

from medusa_kit.base.adapters import OWN_NAME
from medusa_kit.base.origin import HEADS
from medusa_kit.errors import ConfigError
from medusa_kit.files import file_digest, write_json, write_text
from medusa_kit.heads.checkpoint import CONFIG_NAME, PAIRED_FOLDER, WEIGHTS_NAME, stored_digest
from medusa_kit.heads.derived import DERIVED
from medusa_kit.outputs import Ours, check_folder, has_keys, json_object
from medusa_kit.settings.recipe import TrainRecipe, dump
from medusa_kit.store.beside import GATHERED
from medusa_kit.together import WHOLE, finish_moves
from medusa_kit.train.run.lock import LOCK
from medusa_kit.train.run.metrics import METRICS, is_metrics

RECIPE, FINISHED = "recipe.yaml", "run.json"
OWN_FILES = (RECIPE, METRICS, FINISHED, "bad_update.pt")
CHECKPOINT = "checkpoint"
WRITTEN: dict[str, Ours] = {
    METRICS: is_metrics, FINISHED: has_keys("versions", "recipe", "num_updates"),
}  # fmt: skip
MARK = ".medusa-kit-run"  # JSON: digests of files
PROVENANCE, BEGUN = "provenance.json", "begun"
# What transformers, peft and this kit write for a model or adapter, and beside heads. None of them
# writes a README.md.
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors",
               "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_config.json",
               "adapter_model.safetensors", "adapter_model-*-of-*.safetensors",
               "adapter_model.safetensors.index.json", OWN_NAME, "tokenizer.*",
               "tokenizer_config.json", "vocab*", "merges.txt", "special_tokens_map.json",
               "added_tokens.json", "chat_template.jinja", "additional_chat_templates", "*.model",
               "*.tiktoken")  # fmt: skip
# Of hidden files, what this kit may leave and systems write by themselves.
FILES = ".medusa-kit-files"  # JSON: what a run wrote into such a folder, by its name
HIDDEN = (FILES, ".*.tmp", f".*{WHOLE}", ".*.old", ".*.lock", GATHERED, ".DS_Store")
HEADS_FILES = (CONFIG_NAME, WEIGHTS_NAME, PROVENANCE, "calibration_answers.jsonl*", *DERIVED)


def check_own(path: Path, recipe: TrainRecipe, begins: bool) -> None:
    """Raises ConfigError where a run in the folder `path` would replace what no run put there.
    `begins`: whether it starts over, or for the first time."""
    check_folder(path, "output_dir")
    if begins:
        _check_reads(path, recipe)
    if theirs := list(_theirs(path, recipe)):
        raise ConfigError(
            f"{path} holds what no run of ours put there, and this one would replace it: "
            f"{', '.join(theirs)}",
            hint="choose another output_dir, or move them away",
        )
    if begins and not _may_replace(path, recipe):
        raise ConfigError(
            f"{path / RECIPE} is not as a run wrote it, and this one would replace it by the "
            "recipe with all defaults",
            hint="rename it, or choose another output_dir",
        )


def _check_reads(path: Path, recipe: TrainRecipe) -> None:
    """Raises ConfigError where the run would replace the heads or the base that it begins with."""
    written = [(path / name).resolve() for name in results(recipe)]
    read = {"train.heads_from": recipe.train.heads_from, "base.model": recipe.base.model}
    for key, name in read.items():
        for folder in written:
            if name is not None and Path(name).resolve().is_relative_to(folder):
                raise ConfigError(
                    f"{key} is {name}, which this run would replace in {path}",
                    hint="choose another output_dir",
                )


def write_recipe(path: Path, recipe: TrainRecipe) -> None:
    """Write the recipe of a run into its folder, and the mark with its digest."""
    text = dump(recipe)
    write_json(path / MARK, {"files": {RECIPE: _digest(text)}})
    write_text(path / RECIPE, text)


def results(recipe: TrainRecipe) -> tuple[str, ...]:
    """The names of the folders with what comes of a run."""
    if recipe.stage == "medusa1":
        return ("heads",)
    if recipe.trains_whole_base:
        return ("model",)
    return ("adapter", "merged") if recipe.joint_options.save_merged else ("adapter",)


def note_files(folder: Path) -> None:
    """Write down which files a run has written into a new folder with a model or adapter."""
    write_json(folder / FILES, _written_into(folder))


def keep_theirs(folder: Path, new: Path) -> None:
    """Copy into `new`, which takes the place of a folder with a model or adapter, what a person has
    put there while the run went on."""
    for path in _own_among(folder):
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        copy(path, new / path.relative_to(folder))


def _theirs(path: Path, recipe: TrainRecipe) -> Iterator[str]:
    is_run = _is_run(path)
    for name in (*OWN_FILES, CHECKPOINT):
        ours = is_run and WRITTEN.get(name, lambda _: True)(path / name)
        if not ours and _holds_something(path / name):
            yield name
    for name in results(recipe):
        if _holds_something(path / name) and not (is_run and _is_result(path / name)):
            yield name
        elif recipe.stage != "medusa1":  # what lies there is replaced as a whole
            theirs = (*_own_among(path / name), *_changed_among(path / name))
            yield from (str(one.relative_to(path)) for one in theirs)


def _own_among(folder: Path) -> Iterator[Path]:
    """Files in a folder with a model or adapter, and in that of its heads, that no run writes and
    nothing of ours finds for it."""
    for place, written in ((folder, MODEL_FILES), (folder / PAIRED_FOLDER, HEADS_FILES)):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            ours = any(fnmatch(path.name, pattern) for pattern in (*written, *HIDDEN))
            found = path.name not in DERIVED or DERIVED[path.name](path)
            if (ours and found) or path == folder / PAIRED_FOLDER:
                continue
            yield path


def _changed_among(folder: Path) -> Iterator[Path]:
    """Files under names that a run writes, which are not as the run that wrote the folder left
    them. Of earlier versions, which noted nothing, none is known."""
    if (noted := json_object(folder / FILES)) is not None:
        for name, contents in _written_into(folder).items():
            if noted.get(name) != contents:
                yield folder / name


def _written_into(folder: Path) -> dict[str, str | int]:
    """The digest of each file under a name that runs write, of weights the size."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and any(
        fnmatch(path.name, pattern) for pattern in MODEL_FILES)]  # fmt: skip
    return {
        path.name: path.stat().st_size if path.suffix == ".safetensors" else file_digest(path)
        for path in files
    }


def _holds_something(path: Path) -> bool:
    """Whether there is a file, or a folder with anything in it."""
    return any(path.iterdir()) if path.is_dir() else path.exists() or path.is_symlink()


def _is_result(path: Path) -> bool:
    """Whether a run wrote what lies there: it left its provenance, which names the heads."""
    for folder in (path, path / PAIRED_FOLDER):
        finish_moves(folder)
        said = json_object(folder / PROVENANCE)
        if said is not None and {"versions", "recipe"} <= said.keys():
            here = stored_digest(folder)  # None where they are damaged
            return None in (here, said.get(HEADS)) or said[HEADS] == here
    return False


def check_kept(path: Path, recipe: TrainRecipe, begun: str | None) -> None:
    """Raises ConfigError where the heads that a run goes on to improve are another run's. `begun`:
    when this run first began."""
    within = path / results(recipe)[0]
    folder = within if recipe.stage == "medusa1" else within / PAIRED_FOLDER
    there = (json_object(folder / PROVENANCE) or {}).get(BEGUN)
    if begun is not None and there not in (None, begun):
        raise ConfigError(
            f"{folder} holds heads of a run that began at {there}; this one began at {begun}",
            hint="move them away, or put back this run's own",
        )


def _is_run(path: Path) -> bool:
    if json_object(path / MARK) is not None:
        return True
    if WRITTEN[FINISHED](path / FINISHED):
        return True
    for progress in path.glob(f"{CHECKPOINT}/step-*/progress.json"):
        if {"step", "base"} <= (json_object(progress) or {}).keys():
            return True
    return (path / LOCK).is_file() and (path / METRICS).is_file() and _as_dumped(path / RECIPE)


def _may_replace(path: Path, recipe: TrainRecipe) -> bool:
    """Whether nothing of a person's own is lost with the recipe that lies there."""
    text = _text(path / RECIPE)
    if text is None or text == dump(recipe):
        return True
    mark = json_object(path / MARK)
    if mark is None:
        return _as_dumped(path / RECIPE)
    return (mark.get("files") or {}).get(RECIPE) == _digest(text)


def _as_dumped(path: Path) -> bool:
    """Whether a file is a recipe just as `dump` writes one: every section, and no comment."""
    text = _text(path)
    try:
        raw = None if text is None else yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    sections = {"output_dir", "base", "heads", "data", "train", "logging"}
    return (
        isinstance(raw, dict) and sections <= raw.keys()
        and yaml.safe_dump(raw, sort_keys=False) == text
    )  # fmt: skip


def _text(path: Path) -> str | None:
    """None where there is no file, or none of text."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError):
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
