"""An exponential moving average of the trained weights, which is judged and kept in their place.

average = d × average + (1 - d) × weights after each update. d begins near 0 and grows to the
recipe's train.average, so that the untrained weights are soon forgotten. Every process holds the
whole average, of the same bits, since its weights are.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from medusa_kit.errors import CheckpointError, in_one_line
from medusa_kit.train.processes import distributed
from medusa_kit.train.run.torch_file import read_torch_file

NAME = "average.pt"  # in a checkpoint's folder


class MovingAverage:
    """The moving average of a module's trained weights, in float32 at least. With `decay` None it
    does nothing."""

    def __init__(self, module: nn.Module, decay: float | None) -> None:
        self._decay = decay
        self._trained: dict[str, nn.Parameter] = {}
        if decay is not None:
            named = module.named_parameters()
            self._trained = {
                name: parameter for name, parameter in named if parameter.requires_grad
            }
        self._kept = {name: _precise(weight).clone() for name, weight in self._trained.items()}

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Take in the weights after update `step`, counted from 0."""
        if self._decay is None:
            return
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, weight in self._trained.items():
            self._kept[name].lerp_(_precise(weight), 1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the module's weights are their averages."""
        trained = {name: weight.detach().clone() for name, weight in self._trained.items()}
        try:
            self._set(self._kept)
            yield
        finally:
            self._set(trained)

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self._trained.items():
            weight.copy_(weights[name])

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """The averages by name."""
        yield from self._kept.items()

    def save(self, folder: Path) -> None:
        if self._kept and distributed.is_main():
            torch.save(self._kept, folder / NAME)

    def load(self, folder: Path) -> None:
        """Raises CheckpointError for a file that is missing, damaged or of other weights."""
        if not self._kept:
            return
        path = folder / NAME
        try:
            saved = read_torch_file(path)
            for name, kept in self._kept.items():
                kept.copy_(saved[name])
        except Exception as error:  # zip, pickle, key, size and OS errors
            raise CheckpointError(
                f"{path} cannot be read: {in_one_line(error)}",
                hint="add --fresh to start over",
            ) from error


def _precise(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
