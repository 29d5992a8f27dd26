"""How far a model differs from itself by rounding alone.

Shapes: T tokens, V vocabulary, X nodes of several texts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.families import cache_argument, needs_chains
from medusa_kit.base.model import RELATIVE_TOLERANCE, BaseModel, relative_error
from medusa_kit.base.model_state import is_of_plain_code
from medusa_kit.locks import lock_of
from medusa_kit.no_gradients import no_gradients

OWN_ROUNDING_TOKENS = 12
# Lengths of the texts on which a model in 16 bits is compared with itself, and the largest error
# that may pass for rounding, as a share of the logits' spread.
OWN_LENGTHS = (8, 12, 16, 20)
MAX_ROUNDED = 0.5
# What a model's code raises where it is asked for something that it cannot do.
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
            AssertionError)  # fmt: skip


def difference(actual_XV: Tensor, expected_XV: Tensor) -> tuple[float, float]:
    """(rounding tolerance, the largest difference as a share of the spread)."""
    last_bit = torch.finfo(actual_XV.dtype).eps * float(expected_XV.double().abs().max())
    absolute = float((actual_XV.double() - expected_XV.double()).abs().max())
    spread = float(expected_XV.double().std().clamp_min(1e-12))
    return max(2 * absolute, last_bit), absolute / spread


def allowed_error(base: BaseModel, measured: float) -> float:
    """How far logits may be off by rounding alone, as a share of their spread.

    In 16 bits a sound model may round coarsely: SmolLM2-135M in bfloat16, read at once and token by
    token, differs from itself by 0.2 to 0.4. So an error above the usual tolerance is compared with
    that. Attending to a wrong token gives errors of several times the spread.
    """
    # Quantised activations can turn a last bit into a whole step, which is as coarse as bf16.
    allowed = RELATIVE_TOLERANCE[torch.bfloat16 if base.info.quantized else base.dtype]
    if measured <= allowed or base.info.quantized:
        return allowed
    if base.dtype.itemsize != 2 and not needs_chains(base.config):
        return allowed
    return max(allowed, min(2 * own_rounding(base), MAX_ROUNDED))


@no_gradients
def own_rounding(base: BaseModel) -> float:
    """The error of the model compared with itself: read at once and token by token, and with its
    embeddings off by a last bit.

    The second is needed where a processor happens to sum both readings in the same order.
    """
    generator = torch.Generator().manual_seed(0)
    texts = [random_ids(base, length, generator) for length in OWN_LENGTHS]
    texts_1T = [torch.tensor([ids], device=base.device) for ids in texts]
    with lock_of(base):
        whole = torch.cat(
            [base.own_model(ids_1T, use_cache=False).logits[0] for ids_1T in texts_1T]
        )
        stepwise = torch.cat([_read_stepwise(base, ids_1T) for ids_1T in texts_1T])
        with _last_bit_off(base.own_model.get_input_embeddings()):
            off = torch.cat(
                [base.own_model(ids_1T, use_cache=False).logits[0] for ids_1T in texts_1T]
            )
    return max(difference(stepwise, whole)[1], difference(off, whole)[1])


def _read_stepwise(base: BaseModel, ids_1T: Tensor) -> Tensor:
    """logits_TV, one token per forward."""
    name, cache, logits = cache_argument(base.own_model), None, []
    for token_11 in ids_1T.split(1, dim=1):
        step = base.own_model(token_11, use_cache=True, **{name: cache})
        cache = getattr(step, name)
        logits.append(step.logits[0])
    return torch.cat(logits)


@contextmanager
def _last_bit_off(embedding: torch.nn.Module) -> Iterator[None]:
    """Make every second element of the embeddings larger by one unit in the last place."""

    def stir(module: torch.nn.Module, inputs: Any, out: Tensor) -> Tensor:
        alternate = torch.arange(out.shape[-1], device=out.device) % 2
        return out * (1 + torch.finfo(out.dtype).eps * alternate).to(out.dtype)

    handle = embedding.register_forward_hook(stir)
    try:
        yield
    finally:
        handle.remove()


def cached_error(base: BaseModel) -> float | None:
    """How far the model's logits with its own KV cache are from those without, as a share of their
    spread; None where it has no such cache, or code of others that cannot be asked so."""
    ids = random_ids(base, OWN_ROUNDING_TOKENS, torch.Generator().manual_seed(0))
    ids_1T = torch.tensor([ids], device=base.device)
    name = cache_argument(base.own_model)
    try:
        whole_1V = base.own_model(ids_1T, use_cache=False).logits[:, -1]
        before = base.own_model(ids_1T[:, :-1], use_cache=True)
        if (cache := getattr(before, name, None)) is None:
            return None
        cached_1V = base.own_model(ids_1T[:, -1:], use_cache=True, **{name: cache}).logits[:, -1]
    except FAILURES:
        if is_of_plain_code(base.own_model):
            raise
        return None
    return relative_error(cached_1V, whole_1V)


def random_ids(base: BaseModel, count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(0, vocab_size_of(base), (count,), generator=generator).tolist()


def vocab_size_of(base: BaseModel) -> int:
    """How many tokens have both a row and a place in the config."""
    return int(min(base.info.vocab_size, base.config.vocab_size))
