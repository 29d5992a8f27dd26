"""The outputs of some of the base's decoder layers, taken by hooks during one forward of the model.

Shapes: B batch, N nodes, D hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor

from medusa_kit.base import hooks
from medusa_kit.base.model import BaseModel


@contextmanager
def watching(base: BaseModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """The outputs of these layers, hidden_BND by layer, once the model has run in this thread."""
    outputs: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for layer in layers:
            module = decoder_layers(base)[layer]
            hook = module.register_forward_hook(_keeper(outputs, layer))
            stack.callback(hook.remove)
        yield outputs


def decoder_layers(base: BaseModel) -> Sequence[Any]:
    """The decoder's layers in order, empty where its class keeps them elsewhere."""
    decoder = base.own_model.get_decoder() if hasattr(base.own_model, "get_decoder") else None
    layers: Sequence[Any] = getattr(decoder, "layers", ())
    return layers


def _keeper(outputs: dict[int, Tensor], layer: int) -> Any:
    thread = get_ident()  # other threads may run the model too

    @hooks.ours
    def keep(module: Any, args: Any, output: Any) -> None:
        if get_ident() == thread:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

    return keep
