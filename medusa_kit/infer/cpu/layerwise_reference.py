"""The reference of a light base's self-check: transformers' own forward, beside the packing."""

from collections.abc import Iterable
from concurrent.futures import Future, wait
from functools import cached_property
from typing import Any

from torch import Tensor

from medusa_kit.background import in_background
from medusa_kit.base.layerwise import LayerwiseModel, layerwise_model
from medusa_kit.base.model import CHECKPOINT
from medusa_kit.infer.cpu.packed.int8_weights import rounded
from medusa_kit.infer.self_check import Paths, any_window
from medusa_kit.infer.verifier import window_owners


class LayerwiseReference:
    """transformers' own forward of a model here, whose weights are read layer by layer."""

    def __init__(self, name: str, revision: str | None, weights: str) -> None:
        self._name, self._revision = name, revision
        self._change = None if weights == CHECKPOINT else rounded
        self._begun: tuple[Paths, Future[Tensor]] | None = None
        self._held = 0  # turns of its threads that they do not get

    @cached_property
    def _pieces(self) -> LayerwiseModel:
        return layerwise_model(self._name, self._revision, self._change)

    def begin(self, texts: Paths) -> None:
        """Begin to compute the logits of these texts in a thread, on half of the cores until
        somebody waits: the others pack the model meanwhile. A model whose windows the check narrows
        is left until then, as are errors; what has begun goes on, where packing begins again."""
        if self._begun is not None:
            return
        try:
            pieces = self._pieces
            if any_window(window_owners(pieces.model)):
                return
        except Exception:
            return
        self._held = pieces.num_threads // 2
        for _ in range(self._held):
            pieces.turns.acquire()
        self._begun = texts, in_background(pieces.last_logits, texts)

    def stop(self) -> None:
        """Whoever asks later gets it computed then: nobody needs what has begun, and cores and the
        end of the program would wait for it."""
        if self._begun is not None:
            self._pieces.stop()
            self._give_turns()
            del self._pieces
            self._begun = None

    def _give_turns(self) -> None:
        for _ in range(self._held):
            self._pieces.turns.release()
        self._held = 0

    def _wait(self) -> None:
        """Until the model is nobody else's."""
        if self._begun is not None:
            self._give_turns()
            wait([self._begun[1]])

    @property
    def model(self) -> Any:
        self._wait()
        return self._pieces.model

    def last_logits(self, texts: Paths) -> Tensor:
        self._wait()
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == texts:
            return begun[1].result()
        return self._pieces.last_logits(texts)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self._pieces.tensors()
