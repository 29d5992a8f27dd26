"""The training loop: updates, with logging, evaluation and checkpoints.

All randomness follows from (seed, epoch), so an interrupted run continues exactly where it was.

Shapes: P positions, D hidden, K heads, J = K + 1 tokens ahead.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_kit import console
from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.errors import CheckpointError, MedusaKitError, in_one_line
from medusa_kit.heads.checkpoint import read_whole
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train import distributed
from medusa_kit.train.batching import Feed, Update
from medusa_kit.train.engine import TrainingEngine
from medusa_kit.train.evaluate import HeadScores
from medusa_kit.train.loss.loss import HeadsLoss
from medusa_kit.train.run.average import MovingAverage
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.run.random_state import load_random_state, save_random_state
from medusa_kit.train.run.schedule import heads_weight, learning_rate
from medusa_kit.train.run.tracking import RUN_ID, Tracking
from medusa_kit.transfer import together_on_host

Score = Callable[[], HeadScores]
# (updates done, updates planned) -> updates to do in all; asked before the first and after each.
Pace = Callable[[int, int], int]


class TrainingLoop:
    """The state of one run: engine, feed, place in the data, recent losses.

    `score` evaluates the heads as they are; `keep` writes the trained weights into the run's
    folder.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        feed: Feed,
        recipe: TrainRecipe,
        folder: RunFolder,
        identity: dict[str, Any],
        score: Score,
        keep: Callable[[], None],
        pace: Pace | None = None,
        tracking: Tracking | None = None,
    ) -> None:
        self.engine, self.feed, self.recipe, self.folder = engine, feed, recipe, folder
        self.identity = identity
        self._score, self._keep, self._pace = score, keep, pace
        self.average = MovingAverage(engine.module, recipe.train.average)
        self.tracking = tracking or Tracking()
        self.max_updates = feed.updates_per_epoch * recipe.train.epochs
        self.num_updates = self.max_updates
        self.step = 0
        self.best: float | None = None  # simulated acceptance length of the kept weights
        # Plain numbers: tensors kept between blocks of logits would fragment the heap.
        self.recent: list[dict[str, Any]] = []
        self.began = time.monotonic()

    def elapsed(self) -> float:
        """Seconds of training, earlier parts of an interrupted run included."""
        return time.monotonic() - self.began

    def ran(self) -> dict[str, Any]:
        """How far training has come, which may be less than the recipe's epochs."""
        epochs = self.step / max(1, self.feed.updates_per_epoch)
        return {"updates": self.step, "epochs": round(epochs, 4), "of_updates": self.num_updates}

    def resume(self) -> None:
        """Continue from the checkpoint, if any, which `identity.check` has looked at."""
        checkpoint = self.folder.load()
        if checkpoint is None:
            self.folder.begin()
            return
        self.engine.load(checkpoint.folder)
        self.average.load(checkpoint.folder)
        load_random_state(checkpoint.folder / _random_name())
        self.step, self.best = checkpoint.progress["step"], checkpoint.progress["best"]
        self.num_updates = checkpoint.progress.get("num_updates", self.num_updates)
        self.began -= checkpoint.progress["seconds"]
        self.folder.forget_metrics_since(checkpoint)
        console.note(f"continuing from update {self.step} of {self.num_updates}")

    def check_kept(self, heads: Path) -> None:
        """Forgets the best score where the heads that were kept for it cannot be read any more."""
        lost = False
        try:
            if self.best is not None:
                read_whole(heads)
        except CheckpointError as error:
            console.note(f"the best heads so far are lost, the next ones are kept ({error})")
            lost = True
        if distributed.any_of(lost, self.engine.module.heads.base.device):
            self.best = None

    def updates(self) -> None:
        """Run all remaining updates, with logging, evaluation and checkpoints."""
        with (
            _graceful_interrupt() as interrupted,
            console.progress("training", self.num_updates, unit="updates", done=self.step) as bar,
        ):
            self._keep_pace(bar)
            if self.step == 0:  # where the curve begins
                self.judge(keep=self._goes_on)  # what is kept must be better than earlier heads
            for update in self._updates():
                self._update(update)
                self._keep_pace(bar)
                bar.advance(1, self._after_update())
                device = self.engine.module.heads.base.device  # nccl needs tensors on the GPU
                if distributed.any_of(interrupted.is_set(), device):
                    self._stop()

    @property
    def _goes_on(self) -> bool:
        """Whether these heads were trained before, on a base that stays as it is."""
        return self.recipe.train.heads_from is not None and self.recipe.stage == "medusa1"

    def _updates(self) -> Iterator[Update]:
        """The remaining updates."""
        first_epoch, first = divmod(self.step, self.feed.updates_per_epoch)
        for epoch in range(first_epoch, self.recipe.train.epochs):
            for update in self.feed.epoch((self.recipe.seed << 20) + epoch, first):
                if self.step >= self.num_updates:
                    return
                yield update
            first = 0

    def _keep_pace(self, bar: console.ProgressBar) -> None:
        if self._pace is None:
            return
        target = self._pace(self.step, self.num_updates)
        self.num_updates = min(max(target, self.step, 1), self.max_updates)
        bar.expect(self.num_updates)

    def _update(self, update: Update) -> None:
        """Raises MedusaKitError, before any weight changes, when the loss is not finite; also where
        memory is full."""
        with self._explaining_full_memory(keep=True):
            total = HeadsLoss(*together_on_host(*self._gradients(update)))
        if not math.isfinite(float(total.loss)):
            self._not_finite(update, float(total.loss))
        with self._explaining_full_memory(keep=False):
            self.engine.update(learning_rate(self.recipe.train, self.step, self.num_updates))
            self.average.add(self.step)
        self.recent.append({name: part.tolist() for name, part in total._asdict().items()})
        self.step += 1

    def _gradients(self, update: Update) -> HeadsLoss:
        """Add up the gradients of all micro-batches in the weights; returns the losses' sums."""
        joint = self.recipe.joint_options
        weight = heads_weight(joint, self.step, self.num_updates)
        terms = self.engine.module.terms(update.ahead_PJ, weight)
        parts: list[HeadsLoss] = []
        for batch in update.batches:
            result = self.engine.forward(batch, terms)
            self.engine.backward(result.loss)
            parts.append(HeadsLoss(*(part.detach() for part in result)))
        return HeadsLoss(
            *(distributed.summed(torch.stack(part).sum(0)) for part in zip(*parts, strict=True))
        )

    @contextlib.contextmanager
    def _explaining_full_memory(self, keep: bool) -> Iterator[None]:
        """Raises MedusaKitError, which explains, where memory is full inside. `keep`: the weights
        are still those that the last update left, and nothing is due but the next, so a checkpoint
        is written."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = in_one_line(error) or type(error).__name__
            error.__traceback__ = None  # its frames hold tensors
            kept = keep and self.step and distributed.world() == 1
            if kept:
                for parameter in self.engine.module.parameters():
                    parameter.grad = None
                self.save()
            went_on = (
                f"the same command resumes after update {self.step}" if kept
                else "the same command resumes from the checkpoint, if any"
            )  # fmt: skip
            raise MedusaKitError(
                f"memory is full at update {self.step + 1} of {self.num_updates}: {message}",
                hint=f"{went_on}; a new run needs less with a smaller train.micro_batch_positions "
                "and as much more train.accumulation (the losses stay the same)",
            ) from None

    def _not_finite(self, update: Update, loss: float) -> None:
        path = self.folder.path / "bad_update.pt"
        if distributed.is_main():
            with self.folder.explain_disk():
                batches = [{"hidden_PD": b.hidden_PD, "ahead_PJ": b.ahead_PJ,
                            "input_ids_BT": None if b.rows is None else b.rows.input_ids_BT}
                           for b in update.batches]  # fmt: skip
                torch.save({"step": self.step + 1, "batches": batches}, path)
        raise MedusaKitError(
            f"the loss is {loss} at update {self.step + 1} of {self.num_updates}; its batches are "
            f"in {path}",
            hint="lower train.learning_rate; the checkpoint, if any, was written before",
        )

    def _after_update(self) -> str | None:
        """Log, evaluate and save when due. Returns the progress bar's note after a log."""
        options, last = self.recipe.train, self.step == self.num_updates
        due = [self.step % every == 0 for every in
               (options.log_every, options.eval_every, options.save_every)]  # fmt: skip
        note = self._log() if last or any(due) else None
        if due[1] and not last:
            self.judge()
        if due[2] or last:
            self.save()  # what is written at the end may not fit on the disk
        return note

    def _log(self) -> str:
        """Write the mean losses since the last log."""

        def stacked(name: str) -> np.ndarray:
            return np.array([total[name] for total in self.recent])

        line = {
            "step": self.step,
            "loss": stacked("loss").mean().item(),
            "head_loss": stacked("per_head_K").mean(0).tolist(),
            "missing_targets": stacked("missing_K").sum(0).tolist(),
            "seconds": round(self.elapsed(), 3),
        }
        if self.recipe.stage == "medusa2":
            line["base_loss"] = stacked("base").mean().item()
        self.recent.clear()
        self._write(line)
        return f"loss {line['loss']:.3f}"

    def judge(self, keep: bool = True) -> HeadScores:
        """Score on the held-out rows, and with `keep` the weights if they are the best so far."""
        with self._explaining_full_memory(keep=False), self.average.in_place():
            return self._judge(keep)

    def _judge(self, keep: bool) -> HeadScores:
        scores = self._score()
        top1 = " ".join(console.number(share, ".3f") for share in scores.top1)
        length = scores.acceptance_length
        length_note = "" if length is None else f", acceptance length {length:.3f} with 16 nodes"
        console.note(f"update {self.step}: held-out top-1 {top1}{length_note}")
        self._write({"step": self.step, "held_out": scores.as_dict()})
        last = self.step == self.num_updates
        if keep and (self._is_best(length) if self.recipe.train.keep == "best" else last):
            self.best = length
            with self.folder.explain_disk():
                self._keep()
        return scores

    def _is_best(self, length: float | None) -> bool:
        return length is None or self.best is None or length >= self.best

    def _write(self, line: dict[str, Any]) -> None:
        self.folder.log(line)
        self.tracking.log(line)

    def save(self) -> None:
        def write(folder: Path) -> None:
            self.engine.save(folder)
            self.average.save(folder)
            save_random_state(folder / _random_name())

        progress = {
            "step": self.step, "num_updates": self.num_updates, "seconds": self.elapsed(),
            "best": self.best, RUN_ID: self.tracking.run_id,
        }  # fmt: skip
        self.folder.save(write, {**progress, **self.identity})

    def _stop(self) -> None:
        if self.recent:
            self._log()
        self.save()
        console.note(
            f"stopped after update {self.step} of {self.num_updates}; "
            "run the same command again to continue"
        )
        raise KeyboardInterrupt


def _random_name() -> str:
    return f"random-{distributed.rank()}.pt"


@contextlib.contextmanager
def _graceful_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, so that an update is always completed; the second raises."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread may set handlers
        return
    old = signal.getsignal(signal.SIGINT)

    def handle(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, old)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, old)
