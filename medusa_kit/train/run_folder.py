"""A training run on disk, and how it goes on after an interruption.

output_dir/recipe.yaml        the resolved recipe
output_dir/metrics.jsonl      one line every `log_every` updates and every evaluation
output_dir/checkpoint/        heads, optimiser and place in the data; only while unfinished
output_dir/heads/             the trained heads
output_dir/run.json           versions, recipe, scores; written last: the run is finished
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from medusa_kit.config import TrainRecipe, differences, dump, load_recipe
from medusa_kit.errors import CheckpointError, ConfigError, MedusaKitError
from medusa_kit.files import atomic_write

OWN_FILES = ("recipe.yaml", "metrics.jsonl", "run.json")


class RunFolder:
    """The folder of one run. `open` refuses what would mix two runs."""

    def __init__(self, recipe: TrainRecipe) -> None:
        self.recipe = recipe
        self.path = Path(recipe.output_dir)
        self.heads = self.path / "heads"
        self._state = self.path / "checkpoint" / "state.pt"
        self._saved_step: int | None = None

    def open(self, fresh: bool = False) -> None:
        """Check that this recipe may use the folder; `fresh` removes what an older run left.

        Raises ConfigError for another recipe's run, and for a run that is finished.
        """
        if fresh:
            shutil.rmtree(self._state.parent, ignore_errors=True)
            for name in OWN_FILES:
                (self.path / name).unlink(missing_ok=True)
        finished = (self.path / "run.json").is_file()
        if not finished and not self._state.is_file():
            return
        hint = "choose another output_dir, or add --fresh to start over"
        if different := self._differences():
            raise ConfigError(
                f"{self.path} holds a run of another recipe; here ≠ there: {'; '.join(different)}",
                hint=hint,
            )
        if finished:
            raise ConfigError(
                f"{self.path} holds this run, finished: its heads are in {self.heads}", hint=hint
            )

    def _differences(self) -> list[str]:
        path = self.path / "recipe.yaml"
        try:
            return differences(self.recipe, load_recipe(path))
        except ConfigError as error:  # removed, or written by another version
            return [error.message]

    def write_recipe(self) -> None:
        with self._explain_disk(), atomic_write(self.path / "recipe.yaml") as temporary:
            temporary.write_text(dump(self.recipe))

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; the old one stays whole until the new one is."""
        with self._explain_disk(), atomic_write(self._state) as temporary:
            torch.save(state, temporary)
        self._saved_step = state["step"]

    def load(self) -> dict[str, Any] | None:
        """The checkpoint on the CPU, or None. Raises CheckpointError when it is damaged."""
        if not self._state.is_file():
            return None
        try:
            state = torch.load(self._state, map_location="cpu", weights_only=True)
        except Exception as error:  # zip, pickle and OS errors
            raise CheckpointError(
                f"{self._state} cannot be read: {error}", hint="add --fresh to start over"
            ) from error
        self._saved_step = state["step"]
        return state

    def log(self, line: dict[str, Any]) -> None:
        with self._explain_disk(), (self.path / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of updates that the checkpoint does not contain."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        with self._explain_disk(), atomic_write(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in kept))

    def finish(self, summary: dict[str, Any]) -> None:
        with self._explain_disk(), atomic_write(self.path / "run.json") as temporary:
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
        shutil.rmtree(self._state.parent, ignore_errors=True)

    @contextlib.contextmanager
    def _explain_disk(self) -> Iterator[None]:
        """A full disk in our words. torch.save reports one as RuntimeError."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            safe = "nothing" if self._saved_step is None else f"step {self._saved_step}"
            raise MedusaKitError(
                f"cannot write to {self.path}: {error} ({safe} is safe in the checkpoint)",
                hint="make room and run the same command again: it goes on from the checkpoint",
            ) from error


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")  # half a line, cut off by the interruption
