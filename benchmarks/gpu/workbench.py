"""What parts measure: one model on the device at a time, engines around it, and the floor.

Consecutive parts of the same shape share the model; another shape replaces it.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import Clock
from medusa_kit.base.model import BaseModel
from medusa_kit.bench.gpu.shapes import Shape, random_base, successors
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import build_engine
from medusa_kit.errors import (
    ConfigError,
    DeviceMemoryError,
    IncompatibleBaseError,
    MedusaKitError,
)
from medusa_kit.settings.engine import Attention, EngineOptions

ROOM = 1.1  # times a model's weights: memory that must be free to make it
BANDWIDTH = "memory bandwidth"  # the part that measures the floor

Figures = Callable[[str], Mapping[str, Any]]  # of a part that is done, by its name


class Cannot(MedusaKitError):
    """A part cannot be measured on this machine, without a fault; the message is the reason."""


@dataclass(frozen=True)
class StepMode:
    """How an engine runs its steps. `captured`: forwards are, else they run kernel by kernel."""

    captured: bool = True
    compiled: bool = False
    attention: Attention = "auto"

    def __str__(self) -> str:
        words = ["captured" if self.captured else "loop"]
        words += ["compiled"] if self.compiled else []
        words += [] if self.attention == "auto" else [self.attention]
        return ", ".join(words)


CAPTURED, LOOP, COMPILED = StepMode(), StepMode(captured=False), StepMode(compiled=True)


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether a lack of memory caused `error`, which the self-check at load may have wrapped."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | DeviceMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


class Workbench:
    """`small`: the sizes of a dry run. `figures`: the results of earlier parts. `folder`: where
    files are written to besides the report."""

    def __init__(
        self, device: torch.device, small: bool, figures: Figures, folder: Path = Path()
    ) -> None:
        self.device, self.small, self.figures, self.folder = device, small, figures, folder
        self.dtype = torch.bfloat16
        self.clock = Clock(device)
        self._shape: Shape | None = None
        self._base: BaseModel | None = None
        self._engine: tuple[StepMode, Engine] | None = None
        self._failed: dict[tuple[Shape, StepMode], MedusaKitError] = {}  # not built

    def size(self, full: int, small: int) -> int:
        """A count: `full`, or `small` in a dry run."""
        return small if self.small else full

    def untouched(self, shape: Shape) -> BaseModel:
        """A model around which no engine has been built."""
        if self._engine is not None or self._shape != shape:
            self._load(shape)
        assert self._base is not None
        return self._base

    def engine(self, shape: Shape, mode: StepMode) -> Engine:
        """An engine around the model of `shape`. Raises Cannot as `engine_around` does."""
        if (shape, mode) in self._failed:
            raise self._failed[shape, mode].with_traceback(None)
        if self._shape != shape:
            self._load(shape)
        assert self._base is not None
        if self._engine is None or self._engine[0] != mode:
            self._engine = None
            self.collect()
            try:
                self._engine = (mode, self.engine_around(self._base, mode))
            except Exception as error:  # not tried again: a large model takes long to make
                if ran_out_of_memory(error):  # an earlier part may still have held memory
                    raise
                why = (str(error) or repr(error)).splitlines()[0]
                kind = Cannot if isinstance(error, Cannot) else MedusaKitError
                self._failed[shape, mode] = kind(f"{why} (as above)")
                raise
        return self._engine[1]

    def engine_around(self, base: BaseModel, mode: StepMode) -> Engine:
        """Raises Cannot where the named attention is not available here.

        An available one that fails the self-check is an error.
        """
        on_cuda = self.device.type == "cuda"
        # On a CPU `auto` would take the C++ decoder, which is not what a dry run should run.
        attention: Attention = (
            "sdpa" if mode.attention == "auto" and not on_cuda else mode.attention
        )
        try:
            return build_engine(
                base,
                EngineOptions(
                    heads=None,
                    attention=attention,
                    fixed_shapes="always" if mode.captured else "never",
                    compiled=mode.compiled,
                    guesses="all",
                ),
                keep_layers=True,
            )
        except ConfigError as error:
            wrong = isinstance(error.__cause__, IncompatibleBaseError)  # the self-check refused it
            if wrong or mode.attention == "auto":
                raise
            raise Cannot(error.message) from error

    def successors(self, shape: Shape) -> Tensor:
        return successors(shape.vocab_size, self.device)

    def weight_bytes(self, shape: Shape) -> int:
        """The bytes of weights that a step reads."""
        return shape.linear_weights * self.dtype.itemsize

    def floor(self, shape: Shape) -> float | None:
        """Seconds to read a step's weights once; None where the bandwidth was not measured."""
        found = self.figures(BANDWIDTH).get("gb_per_second")
        return None if found is None else self.weight_bytes(shape) / (found * 1e9)

    def _load(self, shape: Shape) -> None:
        """Raises Cannot for a model that needs more memory than is free."""
        self.clear()
        needed = ROOM * shape.all_weights * self.dtype.itemsize
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if needed > free:
                raise Cannot(
                    f"{shape.name} in {str(self.dtype).removeprefix('torch.')} needs about "
                    f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
                )
        self._base = random_base(shape, self.device, self.dtype)
        self._shape = shape

    def clear(self) -> None:
        """Give back the device's memory."""
        self._shape = self._base = self._engine = None
        self.collect()

    def collect(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
