"""The loop of updates: batches in, logging, evaluation and checkpoints on the way.

Everything random follows from (seed, epoch), so an interrupted run goes on exactly where it was.

Shapes: P positions, D hidden, K heads, J = K + 1 tokens ahead.
"""

import contextlib
import hashlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.base_model import BaseModel
from medusa_kit.config import TrainRecipe
from medusa_kit.errors import ConfigError, IncompatibleBaseError, MedusaKitError
from medusa_kit.heads import MedusaHeads
from medusa_kit.train.data import HeadTargets
from medusa_kit.train.engine import make_engine
from medusa_kit.train.evaluate import HeadScores, evaluate
from medusa_kit.train.features import Batch, FeatureStore, LiveFeatures, collect_features
from medusa_kit.train.loss import HeadsLoss, LossModule
from medusa_kit.train.run_folder import RunFolder

SOFT_TOP = 32  # the base's likeliest tokens kept for soft targets, unless the recipe says
Logger = Callable[[dict[str, Any]], None]


class TrainingLoop:
    """The moving parts of one run: engine, feed, place in the data, recent losses."""

    def __init__(
        self,
        base: BaseModel,
        heads: MedusaHeads,
        training: list[HeadTargets],
        held_out: list[HeadTargets],
        recipe: TrainRecipe,
        folder: RunFolder,
    ) -> None:
        self.recipe, self.folder, self.heads = recipe, folder, heads
        options = recipe.train
        self.identity = {"base": base.info.fingerprint, "data": _digest(training)}
        self.external_log = _start_wandb(recipe)
        self.engine = make_engine(
            LossModule(
                heads, options.head_decay, options.chunk_positions, options.soft_share or 0.0
            ),
            recipe,
        )
        self._base, self._training, self._held_out = base, training, held_out
        self.num_positions = sum(len(item.positions_P) for item in training)
        update_positions = options.micro_batch_positions * options.accumulation
        self.updates_per_epoch = max(1, round(self.num_positions / update_positions))
        self.num_updates = self.updates_per_epoch * options.epochs
        self.step = 0
        self.recent: list[HeadsLoss] = []
        self.began = time.monotonic()

    def elapsed(self) -> float:
        """Seconds of training, earlier parts of an interrupted run included."""
        return time.monotonic() - self.began

    def collect(self) -> None:
        """The features: held-out ones always in memory, the others as the recipe says."""
        options = self.recipe.train
        tokens = options.feature_batch_tokens
        soft_top = (options.soft_top or SOFT_TOP) if options.loss == "soft" else 0
        soft_top = min(soft_top, self._base.info.vocab_size)
        self.eval_store = collect_features(self._base, self._held_out, tokens, "held-out features")
        self.feed: FeatureStore | LiveFeatures = (
            LiveFeatures(self._base, self._training, tokens, soft_top)
            if options.features == "live"
            else collect_features(self._base, self._training, tokens, "training features", soft_top)
        )
        self.began = time.monotonic()

    def resume(self) -> None:
        """Take up the checkpoint, if there is one of this base and this data."""
        state = self.folder.load()
        if state is None:
            self.folder.write_recipe()
            return
        if state["base"] != self.identity["base"]:
            raise IncompatibleBaseError(
                f"the checkpoint in {self.folder.path} belongs to a base with fingerprint "
                f"{state['base']}, this one has {self.identity['base']}",
                hint="load the base it was started with, or add --fresh to start over",
            )
        if state["data"] != self.identity["data"]:
            raise ConfigError(
                f"the data changed since the checkpoint in {self.folder.path} was written",
                hint="restore the data files, or add --fresh to start over",
            )
        self.engine.load_state(state["engine"])
        self.step = state["step"]
        self.began -= state["seconds"]
        self.folder.forget_metrics_after(self.step)
        console.note(f"going on from update {self.step} of {self.num_updates}")

    def updates(self) -> None:
        """All updates that are left, with logging, evaluation and checkpoints on the way."""
        positions = self.num_positions
        done = positions * self.step // self.updates_per_epoch
        total = positions * self.recipe.train.epochs
        with (
            _graceful_interrupt() as interrupted,
            console.progress("training", total, unit="tok", done=done) as bar,
        ):
            for batches in self._update_batches():
                self._update(batches)
                note = self._after_update()
                bar.advance(sum(batch.num_positions for batch in batches), note)
                if interrupted.is_set():
                    self._stop()

    def _update_batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of one update after another, from where the run stands."""
        accumulation = self.recipe.train.accumulation
        first_epoch, first = divmod(self.step, self.updates_per_epoch)
        for epoch in range(first_epoch, self.recipe.train.epochs):
            seed = (self.recipe.seed << 20) + epoch
            feed = self.feed.epoch(
                seed, self.updates_per_epoch * accumulation, first * accumulation
            )
            for _ in range(first, self.updates_per_epoch):
                yield list(itertools.islice(feed, accumulation))
            first = 0

    def _update(self, batches: list[Batch]) -> None:
        for batch in batches:
            result = self.engine.forward(batch)
            self.engine.backward(result.loss)
            self.recent.append(HeadsLoss(*(part.detach() for part in result)))
        self.engine.update(self._learning_rate())
        self.step += 1

    def _learning_rate(self) -> float:
        """Linear warm-up, then half a cosine down to 0."""
        options = self.recipe.train
        warmup = round(options.warmup_ratio * self.num_updates)
        if self.step < warmup:
            return options.learning_rate * (self.step + 1) / warmup
        progress = (self.step - warmup) / max(1, self.num_updates - warmup)
        return options.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))

    def _after_update(self) -> str | None:
        """Log, evaluate and save where it is time. Returns the progress bar's note after a log."""
        options, last = self.recipe.train, self.step == self.num_updates
        due = [self.step % every == 0 for every in
               (options.log_every, options.eval_every, options.save_every)]  # fmt: skip
        note = self._log() if last or any(due) else None
        if due[1] and not last:
            self.score()
        if due[2] and not last:
            self.save()
        return note

    def _log(self) -> str:
        """Mean losses since the last log. Raises MedusaKitError when one is not finite."""
        losses = torch.stack([result.loss for result in self.recent]).tolist()
        per_head_K = torch.stack([result.per_head_K for result in self.recent]).mean(0)
        missing_K = torch.stack([result.missing_K for result in self.recent]).sum(0)
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                back = (len(losses) - 1 - index) // self.recipe.train.accumulation
                raise MedusaKitError(
                    f"the loss is {loss} at update {self.step - back} of {self.num_updates}",
                    hint="lower train.learning_rate; the checkpoint, if any, is from before",
                )
        self.recent.clear()
        mean = sum(losses) / len(losses)
        line = {
            "step": self.step,
            "loss": mean,
            "head_loss": per_head_K.tolist(),
            "missing_targets": missing_K.tolist(),
            "seconds": round(self.elapsed(), 3),
        }
        self._write(line)
        return f"loss {mean:.3f}"

    def score(self) -> HeadScores:
        """Evaluate on the held-out positions; one line on stderr, one in the metrics."""
        scores = evaluate(self.heads, self.eval_store, self.recipe.train.chunk_positions)
        top1 = " ".join(f"{share:.3f}" for share in scores.top1)
        top5 = " ".join(f"{share:.3f}" for share in scores.top5)
        console.note(f"update {self.step}: held-out top-1 {top1}, top-5 {top5}")
        self._write({"step": self.step, "held_out": scores.as_dict()})
        return scores

    def _write(self, line: dict[str, Any]) -> None:
        self.folder.log(line)
        self.external_log(line)

    def save(self) -> None:
        self.folder.save(
            {
                "step": self.step,
                "seconds": self.elapsed(),
                **self.identity,
                "engine": self.engine.state(),
            }
        )

    def _stop(self) -> None:
        if self.recent:
            self._log()
        self.save()
        console.note(
            f"stopped after update {self.step} of {self.num_updates}; "
            "run the same command again to go on"
        )
        raise KeyboardInterrupt


@contextlib.contextmanager
def _graceful_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, so that an update is never cut in two; the second raises."""
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


def _digest(items: Sequence[HeadTargets]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(torch.tensor(item.input_ids, dtype=torch.int32).numpy().tobytes())
        digest.update(item.ahead_PJ.tobytes())
    return digest.hexdigest()


def _start_wandb(recipe: TrainRecipe) -> Logger:
    """Where metrics go besides the file. Raises ConfigError when wandb is asked for but missing."""
    if not recipe.logging.wandb:
        return lambda line: None
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "logging.wandb is true, but the package wandb is not installed",
            hint="pip install 'medusa-kit[train]', or add logging.wandb=false",
        ) from error
    Path(recipe.output_dir).mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=recipe.logging.project, dir=recipe.output_dir, config=recipe.model_dump()
    )
    return lambda line: run.log(line, step=line["step"])
