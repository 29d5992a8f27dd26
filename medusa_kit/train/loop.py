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
from medusa_kit.base.faults.finite import not_finite
from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.errors import CheckpointError, MedusaKitError, NotFiniteError, in_one_line
from medusa_kit.heads.checkpoint import read_whole
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train import finite
from medusa_kit.train.batching import Feed, Update
from medusa_kit.train.engine import TrainingEngine
from medusa_kit.train.evaluate import HeadScores
from medusa_kit.train.loss.loss import HeadsLoss
from medusa_kit.train.processes import distributed
from medusa_kit.train.run.average import MovingAverage
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.run.random_state import load_random_state, save_random_state
from medusa_kit.train.run.schedule import heads_weight, learning_rate
from medusa_kit.train.run.tracking import RUN_ID, Tracking
from medusa_kit.transfer import together_on_host

KEPT = "Heads and checkpoints that were written before are kept"
LOWER = "lower train.learning_rate and add --fresh to start over"
OF_BASE = (
    "weights of the base are damaged, or base.dtype is too narrow for these rows: copy the base "
    "again, or use a wider dtype"
)
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
        self._checked: int | None = None  # the update whose weights are known to be finite
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
        self._check_loaded(checkpoint.folder)
        load_random_state(checkpoint.folder / _random_name())
        self.step, self.best = checkpoint.progress["step"], checkpoint.progress["best"]
        self.num_updates = checkpoint.progress.get("num_updates", self.num_updates)
        self.began -= checkpoint.progress["seconds"]
        self.folder.forget_metrics_since(checkpoint)
        console.note(f"continuing from update {self.step} of {self.num_updates}")

    def _check_loaded(self, folder: Path) -> None:
        """Raises CheckpointError, in all processes, for a checkpoint with NaN or infinite numbers,
        which versions that did not look have written."""
        tensors = (*self.engine.trained(), *self.engine.moments(), *self.average.kept())
        if names := finite.damaged(tensors, self.engine.module.heads.base.device):
            raise CheckpointError(
                f"the checkpoint in {folder} holds NaN or infinite numbers: "
                f"{finite.in_words(names)}; expected finite numbers",
                hint="add --fresh to start over, with a lower train.learning_rate",
            )

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
                self._stop_where(interrupted)
        self._stop_where(interrupted)  # typed after the last update

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
        """Raises NotFiniteError, before any weight changes, when the loss or its gradients are not
        finite; MedusaKitError where memory is full."""
        with self._explaining_full_memory(keep=True):
            total, norm = self._losses_and_norm(update)
        if not math.isfinite(float(total.loss)):
            self._not_finite(update, total)
        self._check_norm(norm)
        with self._explaining_full_memory(keep=False):
            rate = learning_rate(self.recipe.train, self.step, self.num_updates)
            with self._explaining_overflow(rate):
                self._check_norm(self.engine.update(rate))
            self.average.add(self.step)
        self.recent.append({name: part.tolist() for name, part in total._asdict().items()})
        self.step += 1

    def _losses_and_norm(self, update: Update) -> tuple[HeadsLoss, float | None]:
        """The losses' sums and the norm of the gradients, in one transfer."""
        losses, norm = self._gradients(update), self.engine.norm()
        if norm is None:
            return HeadsLoss(*together_on_host(*losses)), None
        *parts, on_host = together_on_host(*losses, norm)
        return HeadsLoss(*parts), float(on_host)

    def _check_norm(self, norm: float | None) -> None:
        if norm is not None and not math.isfinite(norm):
            raise self._stopped(f"the norm of the gradients is {norm} {self._at(self.step + 1)}")

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

    @contextlib.contextmanager
    def _explaining_overflow(self, rate: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "without overflow" not in str(error):  # as torch says that a number is too large
                raise
            what = f"a step of the learning rate {rate:g} is too large for a number"
            raise self._stopped(f"{what} {self._at(self.step + 1)}") from error

    def _at(self, step: int) -> str:
        return f"at update {step} of {self.num_updates}"

    def _stopped(self, what: str, hint: str | None = None, more: str = "") -> NotFiniteError:
        return NotFiniteError(f"{what}; expected finite numbers.{more} {KEPT}", hint=hint or LOWER)

    def _check_weights(self) -> None:
        """Raises NotFiniteError, in all processes, where trained weights are not finite: they are
        not judged and not written."""
        if self._checked == self.step:
            return
        device = self.engine.module.heads.base.device
        if names := finite.damaged(self.engine.trained(), device):
            when = f"after update {self.step} of {self.num_updates}"
            what = "weights are NaN or infinite"
            raise self._stopped(f"{what} {when}: {finite.in_words(names)}", self._of_weights())
        self._checked = self.step

    def _not_finite(self, update: Update, total: HeadsLoss) -> None:
        path = self.folder.path / "bad_update.pt"
        if distributed.is_main():
            with self.folder.explain_disk():
                batches = [{"hidden_PD": b.hidden_PD, "ahead_PJ": b.ahead_PJ,
                            "input_ids_BT": None if b.rows is None else b.rows.input_ids_BT}
                           for b in update.batches]  # fmt: skip
                torch.save({"step": self.step + 1, "batches": batches}, path)
        why, hint = self._reason(any(not_finite(states) for states in _hidden_of(update)))
        whose = finite.whose(total, self.recipe.stage == "medusa2")
        raise self._stopped(
            f"the loss is {float(total.loss)} {self._at(self.step + 1)} ({whose}){why}",
            hint,
            f" Its batches are in {path}.",
        )

    def _reason(self, in_hidden: bool) -> tuple[str, str | None]:
        """(why a loss is no number, what to do about it), as far as weights and hidden states tell;
        all processes call this. `in_hidden`: whether hidden states that it was computed from are
        NaN or infinite."""
        device = self.engine.module.heads.base.device
        if names := finite.damaged(self.engine.trained(), device):
            return f"; weights are NaN or infinite: {finite.in_words(names)}", self._of_weights()
        if names := finite.damaged(finite.frozen(self.engine.module), device):
            return f"; weights of the base are NaN or infinite: {finite.in_words(names)}", OF_BASE
        if distributed.any_of(in_hidden, device):
            return ", since hidden states of the base are NaN or infinite", OF_BASE
        return "", None

    def _of_weights(self) -> str:
        """What to do about weights that are no numbers: before the first update they are the
        base's own."""
        return LOWER if self.step else OF_BASE

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
        self._check_weights()
        with self._explaining_full_memory(keep=False), self.average.in_place():
            return self._judge(keep)

    def _judge(self, keep: bool) -> HeadScores:
        scores = self._score()
        if names := scores.without_loss:
            what = f"the held-out loss of {', '.join(names)} is no finite number"
            why, hint = self._reason(not scores.hidden_finite)
            raise self._stopped(f"{what} after update {self.step} of {self.num_updates}{why}", hint)
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
        if length is not None and math.isnan(length):
            return False
        return length is None or self.best is None or length >= self.best

    def _write(self, line: dict[str, Any]) -> None:
        self.folder.log(line)
        self.tracking.log(line)

    def save(self) -> None:
        self._check_weights()

        def write(folder: Path) -> None:
            self.engine.save(folder)
            self.average.save(folder)
            save_random_state(folder / _random_name())

        progress = {
            "step": self.step, "num_updates": self.num_updates, "seconds": self.elapsed(),
            "best": self.best, RUN_ID: self.tracking.run_id,
        }  # fmt: skip
        self.folder.save(write, {**progress, **self.identity})

    def _stop_where(self, interrupted: threading.Event) -> None:
        """Save and raise KeyboardInterrupt where one process was interrupted."""
        device = self.engine.module.heads.base.device  # nccl needs tensors on the GPU
        if not distributed.any_of(interrupted.is_set(), device):
            return
        if self.recent:
            self._log()
        self.save()
        console.note(
            f"stopped after update {self.step} of {self.num_updates}; "
            "run the same command again to continue"
        )
        raise KeyboardInterrupt


def _hidden_of(update: Update) -> Iterator[torch.Tensor]:
    for batch in update.batches:
        if batch.hidden_PD is not None:
            yield batch.hidden_PD


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
