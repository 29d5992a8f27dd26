"""A training run on disk, which can be continued after an interruption.

output_dir/recipe.yaml         the resolved recipe
output_dir/metrics.jsonl       one line every `log_every` updates and every evaluation
output_dir/checkpoint/step-N/  engine, random states; progress.json, written last, has their digests
output_dir/heads/              the heads: the best so far, or with train.keep=last the last
output_dir/model/, adapter/    from Medusa-2: model or adapter, with the heads inside
output_dir/.training.lock      locked by the process that trains here; .training.json names it
output_dir/run.json            versions, recipe, scores; written last: the run is finished
output_dir/.medusa-kit-run     says that a run of ours works here, see own_files.py
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from medusa_kit.errors import (
    CheckpointError,
    ConfigError,
    MedusaKitError,
    WriteError,
)
from medusa_kit.files import (
    finish_replacing,
    is_full_disk,
    parse_json,
    why_not_written,
    write_json,
    write_text,
)
from medusa_kit.settings.recipe import TrainRecipe, differences, read_recipe, resolved
from medusa_kit.train.processes import distributed
from medusa_kit.train.run import metrics
from medusa_kit.train.run.checkpoint_files import FILES, check_files, digests
from medusa_kit.train.run.lock import only_training_in
from medusa_kit.train.run.metrics import METRICS
from medusa_kit.train.run.own_files import (
    OWN_FILES,
    RECIPE,
    check_kept,
    check_own,
    results,
    write_recipe,
)
from medusa_kit.train.run.provenance import origin_here, provenance

PROGRESS = "progress.json"
DATE = "date"  # in progress.json: of the text that templates write the date into
PROGRESS_TYPES: dict[str, Any] = {
    "step": int, "num_updates": int | None, "seconds": float | int, "best": float | int | None,
    DATE: str | None,
}  # fmt: skip


class Checkpoint(NamedTuple):
    folder: Path
    progress: dict[str, Any]  # step, seconds, best; its base, data and number of processes


class RunFolder:
    """The folder of one run, which only the main process writes. `open` prevents mixing two."""

    def __init__(self, recipe: TrainRecipe) -> None:
        self.recipe = recipe
        self.path = Path(recipe.output_dir)
        self.heads = self.path / "heads"
        self._checkpoints = self.path / "checkpoint"
        self._saved_step: int | None = None
        self.date: str | None = None
        self._fresh = False  # an older run is dropped once the new one begins

    @cached_property
    def origin(self) -> dict[str, Any]:
        """Versions and commit at the first save. Read once, since git can take seconds."""
        return origin_here()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """A context in which no other training writes here; the main process holds the lock.

        Raises ConfigError where another training writes here, MedusaKitError where the folder
        cannot be written; both in every process, so that none waits for one that is gone.
        """
        with contextlib.ExitStack() as stack:
            refused: MedusaKitError | None = None
            if distributed.is_main():
                try:
                    with self.explain_disk():
                        stack.enter_context(only_training_in(self.path))
                        for name in results(self.recipe):
                            finish_replacing(self.path / name)
                except MedusaKitError as error:
                    refused = error
            refused = distributed.from_main(refused)
            if refused is not None:
                raise refused
            yield

    def check_own(self, fresh: bool = False) -> None:
        """Raises ConfigError where the run would replace what no run put there. Writes nothing but
        what a killed run had yet to move."""
        goes_on = not fresh and (self.finished or bool(self._complete()))
        check_own(self.path, self.recipe, begins=not goes_on)

    @property
    def finished(self) -> bool:
        return (self.path / "run.json").is_file()

    def open(self, fresh: bool = False) -> None:
        """Check that this recipe may use the folder. With `fresh` every recipe may: `begin` removes
        the files of an older run, which stay where the new one is refused before that.

        Raises ConfigError for another recipe's run, for a run that is finished, and for metrics
        that are not this run's.
        """
        self._fresh = fresh
        if fresh or not self._holds_run():
            return
        hint = "choose another output_dir, or add --fresh to start over"
        if different := self._differences():
            raise ConfigError(
                f"{self.path} holds a run of another recipe; here ≠ there: {'; '.join(different)}",
                hint=hint,
            )
        if self.finished:
            raise ConfigError(
                f"{self.path} holds this run, which is finished: see {self.heads}", hint=hint
            )
        if (checkpoint := self.load()) is not None:
            metrics.check(self.path / METRICS, checkpoint.progress)
            if checkpoint.progress["best"] is not None:
                check_kept(self.path, self.recipe, checkpoint.progress[DATE])

    def _holds_run(self) -> bool:
        """Of a run that left no checkpoint there are metrics, if it came as far as an update."""
        there = self.finished or bool(self._complete())
        return there or metrics.has_updates(self.path / METRICS)

    def _differences(self) -> list[str]:
        try:
            there = resolved(read_recipe(self.path / RECIPE))  # of Python, by earlier versions
            moved = there.model_copy(update={"output_dir": self.recipe.output_dir})
            return differences(self.recipe, moved)  # a folder may have got another place
        except ConfigError as error:  # removed, or written by another version
            return [error.message]

    def first_date(self) -> datetime:
        """When this run first began, the same in every process: templates may write the date, and
        a run that goes on another day must read the same text."""
        self.date = self.earlier(DATE) or distributed.from_main(_now().isoformat())
        return datetime.fromisoformat(self.date)

    def earlier(self, name: str) -> Any:
        """What the checkpoint to go on from notes under this name; None without one."""
        checkpoint = self.load()
        return None if checkpoint is None else checkpoint.progress.get(name)

    def begin(self) -> None:
        """Remove the files of a run that is started over or never saved a checkpoint, before the
        first update."""
        if distributed.is_main():
            if self._fresh:
                self._drop_checkpoints()
            for name in OWN_FILES:
                (self.path / name).unlink(missing_ok=True)
            with self.explain_disk():
                write_recipe(self.path, self.recipe)

    def save(self, write: Callable[[Path], None], progress: dict[str, Any]) -> None:
        """Write a new checkpoint; the old one is removed once the new one is complete.

        `write` is called in every process, with a folder that all of them write into. A step that
        is safe already is not written again.
        """
        if progress["step"] == self._saved_step:
            return
        folder = self._checkpoints / f"step-{progress['step']:08d}"
        with self.explain_disk():
            if distributed.is_main():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            distributed.barrier()
            try:
                write(folder)
                distributed.barrier()
                if distributed.is_main():
                    record = provenance(self.recipe, self.origin)
                    (folder / "provenance.json").write_text(record)
                    more = {DATE: self.date, FILES: digests(folder)}
                    lines = metrics.noted(self.path / METRICS)
                    write_json(folder / PROGRESS, {**progress, **more, **lines})
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        self._saved_step = progress["step"]
        if distributed.is_main():
            self._drop_checkpoints(keep=folder)

    def _drop_checkpoints(self, keep: Path | None = None) -> None:
        """Removes checkpoints one by one and keeps their folder, which may be a link."""
        for folder in self._checkpoints.glob("step-*"):
            if folder != keep:
                shutil.rmtree(folder, ignore_errors=True)
        if keep is None and not self._checkpoints.is_symlink():
            shutil.rmtree(self._checkpoints, ignore_errors=True)

    def load(self) -> Checkpoint | None:
        """The newest complete checkpoint to continue from, or None. Raises CheckpointError when it
        is damaged, or its files do not belong together."""
        complete = [] if self._fresh else self._complete()
        if not complete:
            return None
        path = complete[-1] / PROGRESS
        try:
            progress = parse_json(path.read_text())
            self._saved_step = progress["step"]
            for name, kind in PROGRESS_TYPES.items():
                if not isinstance(value := progress.get(name), kind):
                    raise ValueError(f"{name} is {value!r}")
            if progress.get(DATE) is not None:
                datetime.fromisoformat(progress[DATE])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}", hint="add --fresh to start over"
            ) from error
        check_files(complete[-1], progress)
        return Checkpoint(complete[-1], progress)

    def _complete(self) -> list[Path]:
        return sorted(path.parent for path in self._checkpoints.glob(f"step-*/{PROGRESS}"))

    def log(self, line: dict[str, Any]) -> None:
        if distributed.is_main():
            with self.explain_disk(), (self.path / METRICS).open("a") as stream:
                stream.write(json.dumps(line) + "\n")

    def forget_metrics_since(self, checkpoint: Checkpoint) -> None:
        """Drop the lines that were written after the checkpoint."""
        if not distributed.is_main():
            return
        lines = metrics.kept(self.path / METRICS, checkpoint.progress)
        with self.explain_disk():
            write_text(self.path / METRICS, "".join(f"{line}\n" for line in lines))

    def finish(self, summary: dict[str, Any]) -> None:
        if not distributed.is_main():
            return
        with self.explain_disk():
            write_json(self.path / "run.json", summary)
        self._drop_checkpoints()

    @contextlib.contextmanager
    def explain_disk(self) -> Iterator[None]:
        """Turns whatever is raised where a file cannot be written into a WriteError."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError | RuntimeError) and not is_full_disk(error):
                raise
            cause = error.__cause__ if isinstance(error, WriteError) else None
            safe = "nothing" if self._saved_step is None else f"step {self._saved_step}"
            raise WriteError(
                f"cannot write to {self.path}: {why_not_written(cause or error)} "
                f"({safe} is safe in the checkpoint)",
                hint="make room and run the same command again: it continues from the checkpoint",
            ) from error


def _now() -> datetime:
    return datetime.now()
