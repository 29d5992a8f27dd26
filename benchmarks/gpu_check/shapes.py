"""Models of real shapes without weights, and forwards over them, for counting without a GPU.

Everything is on the meta device, which has shapes but no numbers, so an 8B model takes no memory.
Reading a value fails there.
"""

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.bench.gpu.shapes import LLAMA_8B, SMOLLM2_135M
from medusa_kit.infer.attention import triton_backend
from medusa_kit.infer.attention.backend import AttentionCall
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.device.cache import FixedCache
from medusa_kit.infer.device.captured import CapturedForward, Shape, fitting
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.verifier import Forward

META = torch.device("meta")
SHAPES: dict[str, dict[str, Any]] = {
    shape.name: {**shape.sizes, "tie_word_embeddings": tied}
    for shape, tied in ((SMOLLM2_135M, True), (LLAMA_8B, False))
}
CORES = 132  # streaming multiprocessors of an H100 or H200


def base_of_shape(shape: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> BaseModel:
    """A Llama of this shape: checked at a small size with values, then replaced by one without."""
    small = {**shape, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}  # fmt: skip
    base = wrap_model(_llama(small, dtype, torch.device("cpu")), None, "shapes only")
    base._model = _llama(shape, dtype, META).requires_grad_(False)
    base.config = base.own_model.config
    base.info = replace(
        base.info,
        hidden_size=shape["hidden_size"],
        vocab_size=shape["vocab_size"],
        num_layers=shape["num_hidden_layers"],
        context_length=shape["max_position_embeddings"],
        device="meta",
    )
    return base


def _llama(shape: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with device:
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **shape), dtype=dtype
        ).eval()


@dataclass
class Launch:
    """One launch of one of our kernels, and the bytes that it moves."""

    name: str
    num_bytes: int


class TritonLaunches(AttentionChoice):
    """Attention as on a GPU by the Triton backend, whose launches are recorded, not executed.

    `length`: tokens of each row, which decide how much of the cache is read.
    """

    def __init__(self, length: int) -> None:
        super().__init__("auto", fixed_shapes=True)
        self.length, self.launches = length, list[Launch]()

    def attend(self, call: AttentionCall) -> Tensor:
        key_BGLE, value_BGLE = call.key_BGLE, call.value_BGLE
        B, _, N, E = call.query_BHNE.shape
        read = B * key_BGLE.shape[1] * (self.length + N) * (E + value_BGLE.shape[-1])

        def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
            tensors = [one for one in arguments if isinstance(one, Tensor)]
            moved = sum(
                one.nbytes for one in tensors if one is not key_BGLE and one is not value_BGLE
            )
            slots = read * key_BGLE.element_size() if any(t is key_BGLE for t in tensors) else 0
            self.launches.append(Launch(kernel.fn.__name__, moved + slots))

        return triton_backend.launched(note, call)


def cores_of_a_gpu() -> Any:
    """A context in which splits are chosen as on a GPU of CORES."""
    return mock.patch.object(triton_backend, "_num_cores", _cores)


def _cores(device: torch.device) -> int:
    return CORES


class Kept(CapturedForward):
    """A forward that keeps its cache, which keeps its forwards elsewhere."""

    def __init__(
        self, verifier: CapturedVerifier, cache: FixedCache, shape: Shape, forward: Forward
    ) -> None:
        super().__init__(verifier, cache, shape, forward)
        self.cache = cache


@torch.inference_mode()
def forward_of_shape(
    base: BaseModel,
    num_nodes: int,
    num_positions: int,
    attention: TritonLaunches,
    rows: int = 1,
    forward: Forward | None = None,
) -> CapturedForward:
    """A forward over rows of so many nodes each, as it would be captured, with its slots
    allocated. `forward`: in place of the model's."""
    verifier = CapturedVerifier(base, attention)
    cache = verifier.new_cache(rows, num_positions)
    assert isinstance(cache, FixedCache)
    cache.lengths = [attention.length] * rows
    nodes = Forest.chains([[0] * num_nodes] * rows, META)  # any tree takes the same kernels
    shape = Shape(*fitting(nodes.counts, rows), cache.num_positions)
    captured = Kept(verifier, cache, shape, forward or base.hidden_and_logits)
    captured.send(nodes, range(rows))
    with cores_of_a_gpu():
        captured.run()
    return captured


def no_model(base: BaseModel) -> Forward:
    """A forward that computes nothing."""
    D, V = base.info.hidden_size, base.info.vocab_size

    def forward(tokens_BN: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        hidden_BND = torch.empty(*tokens_BN.shape, D, dtype=base.dtype, device=META)
        return hidden_BND, torch.empty(*tokens_BN.shape, V, dtype=base.dtype, device=META)

    return forward
