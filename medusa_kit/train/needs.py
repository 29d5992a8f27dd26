"""What a run needs for so much text: bytes in memory and on disk, seconds."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from medusa_kit.base.placement import DTYPES
from medusa_kit.errors import WriteError
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.checkpoint import STORED_DTYPES
from medusa_kit.heads.int8 import stored_bytes
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.features.features import FeatureOptions
from medusa_kit.train.optimizer import moments
from medusa_kit.train.processes import distributed

SIZES = (100_000, 300_000, 1_000_000)  # positions, in the table


@dataclass(frozen=True)
class Text:
    """How much there is to train on."""

    positions: int  # trained in an epoch
    tokens: int  # read for hidden states
    held_out: int  # positions kept of rows that are held out

    def scaled(self, positions: int) -> "Text":
        """More or less of the same."""
        factor = positions / self.positions
        return Text(positions, *(round(n * factor) for n in (self.tokens, self.held_out)))


@dataclass(frozen=True)
class Weights:
    """Numbers that are trained, and the bytes of files that hold them."""

    trained: int
    heads_bytes: int
    moved_bytes: int  # Medusa-2: of an adapter or a whole model
    merged_bytes: int
    moments: int  # numbers that the optimiser keeps
    average: bool

    @property
    def checkpoint_bytes(self) -> int:
        return 4 * (self.trained * (2 if self.average else 1) + self.moments)

    @property
    def state_bytes(self) -> int:
        """In memory beside the model: float32 weights, gradients, moments, average."""
        return 4 * (self.trained * (3 if self.average else 2) + self.moments)


def weights_of(
    recipe: TrainRecipe, heads: MedusaHeads, moving: Sequence[torch.Tensor], base_numbers: int,
    moments: int,
) -> Weights:  # fmt: skip
    """`moving`: what is trained of the base. Files are in the dtype that they are written in."""
    saved = STORED_DTYPES[recipe.heads.save_dtype or recipe.base.dtype]
    further = heads.with_heads(heads.num_heads + recipe.heads.further_heads)
    heads_bytes = stored_bytes(further.state_dict(), saved)
    moved = sum(tensor.numel() for tensor in moving)
    base_bytes = base_numbers * DTYPES[recipe.base.dtype].itemsize
    whole = recipe.trains_whole_base
    merged = recipe.stage == "medusa2" and recipe.joint_options.save_merged
    trained = moved + sum(p.numel() for p in heads.parameters() if p.requires_grad)
    return Weights(
        trained, heads_bytes, base_bytes if whole else 4 * moved, base_bytes if merged else 0,
        moments, recipe.train.average is not None,
    )  # fmt: skip


def check_room(folder: Path, recipe: TrainRecipe, heads: MedusaHeads, base_numbers: int) -> None:
    """Raises WriteError, before hidden states are computed, where a first checkpoint and the heads
    do not fit on the disk of `folder`. An adapter's weights are not known yet, nor counted."""
    trained = sum(p.numel() for p in heads.parameters() if p.requires_grad)
    trained += base_numbers if recipe.trains_whole_base else 0
    weights = weights_of(recipe, heads, (), base_numbers, moments(heads, trained, recipe))
    weights = replace(weights, trained=trained)
    moved = weights.moved_bytes if recipe.trains_whole_base else 0
    needed = weights.heads_bytes + moved
    if not (folder / "checkpoint").is_symlink():  # to another disk
        needed += weights.checkpoint_bytes
    free = distributed.from_main(shutil.disk_usage(folder).free if distributed.is_main() else 0)
    if free < needed:
        raise WriteError(
            f"{folder} has {size(free)} free; heads and a checkpoint take {size(needed)}",
            hint="make room, or choose another output_dir",
        )


@dataclass(frozen=True)
class Speed:
    """Seconds on this machine."""

    token: float  # to read one for hidden states
    position: float  # to train on one, once


class Forecast:
    """`peak`: bytes of a run on no text. `numbers`: of a hidden state, in bytes `itemsize` each."""

    def __init__(
        self, recipe: TrainRecipe, weights: Weights, speed: Speed, peak: float, hidden_size: int,
        itemsize: int, options: FeatureOptions,
    ) -> None:  # fmt: skip
        self.recipe, self.weights, self.speed, self.peak = recipe, weights, speed, peak
        self._numbers, self._itemsize = options.states * hidden_size, itemsize
        self._soft = 8 * options.soft_top
        self.stored = recipe.stage == "medusa1" and recipe.train.features != "live"
        self.on_disk = self.stored and recipe.train.features == "disk"

    def features(self, text: Text) -> float:
        """Bytes of hidden states, in the dtype that they are kept in."""
        if not self.stored:
            return 0.0
        size = DTYPES[self.recipe.train.cache_dtype].itemsize if self.on_disk else self._itemsize
        return float(text.positions) * (self._numbers * size + self._soft)

    def in_memory(self, text: Text) -> float:
        """Bytes of hidden states that are not on disk: those of held-out rows never are."""
        if not self.stored:
            return 0.0
        trained = 0.0 if self.on_disk else self.features(text)
        return trained + float(text.held_out) * self._numbers * self._itemsize

    def tried(self, text: Text) -> float:
        """Bytes of a trial's hidden states, all of which are in memory."""
        if not self.stored:
            return 0.0
        each = self._numbers * self._itemsize
        return float(text.positions) * (each + self._soft) + float(text.held_out) * each

    def memory(self, text: Text) -> float:
        """The peak, files that are mapped included."""
        mapped = self.features(text) if self.on_disk else 0.0
        joint = self.recipe.joint_options
        cached = self.recipe.stage == "medusa2" and (
            joint.teacher == "cached" or joint.moves == "full"
        )
        guesses = text.positions * joint.distill_top * 8 if cached else 0
        return self.peak + self.in_memory(text) + mapped + guesses

    def disk(self, text: Text) -> float:
        """Bytes on disk at most, while one checkpoint replaces another."""
        weights = self.weights
        written = weights.heads_bytes + weights.moved_bytes + weights.merged_bytes
        features = self.features(text) if self.on_disk else 0.0
        return written + 2 * weights.checkpoint_bytes + features

    def reading(self, text: Text) -> float:
        """Seconds for hidden states, where they are computed once."""
        return self.speed.token * text.tokens / distributed.world() if self.stored else 0.0

    def updating(self, text: Text) -> float:
        epochs = self.recipe.train.epochs
        return self.speed.position * text.positions * epochs / distributed.world()

    def written(self, text: Text) -> str:
        """Which files, how large, and in which dtype."""
        recipe, weights = self.recipe, self.weights
        saved = recipe.heads.save_dtype or recipe.base.dtype
        parts = [f"heads {size(weights.heads_bytes)} in {saved}"]
        if recipe.stage == "medusa2":
            whole = recipe.trains_whole_base
            what, dtype = ("model", recipe.base.dtype) if whole else ("adapter", "float32")
            parts.append(f"{what} {size(weights.moved_bytes)} in {dtype}")
        if weights.merged_bytes:
            parts.append(f"merged model {size(weights.merged_bytes)} in {recipe.base.dtype}")
        parts.append(f"a checkpoint {size(weights.checkpoint_bytes)} in float32 (two for a moment)")
        if self.on_disk:
            parts.append(f"hidden states {size(self.features(text))} in {recipe.train.cache_dtype}")
        return f"written, about: {', '.join(parts)} for {text.positions:,} training tokens"

    def table(self, text: Text) -> list[str]:
        """Three sizes of text like this one."""
        lines = ["training tokens  hours  memory, GB  disk, GB"]
        for positions in SIZES:
            some = text.scaled(positions)
            hours = (self.reading(some) + self.updating(some)) / 3600
            gigabytes = self.memory(some) / 1e9, self.disk(some) / 1e9
            lines.append(
                f"{positions:>15,}  {hours:>5.{1 if hours >= 10 else 2}f}  {gigabytes[0]:>10.2f}  "
                f"{gigabytes[1]:>8.2f}"
            )
        return lines


def size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
