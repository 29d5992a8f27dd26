"""What an engine held on a device is given back as soon as nobody refers to it, without Python's
search for garbage, which may come much later."""

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn
from unittest import mock

import pytest
from support.cuda_stand_in import Device
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_base, tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import DeviceMemoryError
from medusa_kit.garbage import no_search
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.device.cache import FixedCache
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.drafters import BROUGHT_ALONG, DRAFTERS

SOON = 20.0
PROMPTS = [random_prompt(length, length) for length in (3, 11)]


@contextmanager
def no_garbage_found() -> Iterator[None]:
    """From here on: transformers leaves some behind where it builds a model."""
    gc.collect()
    with no_search():
        yield


def caches_of(engine: Engine) -> list[FixedCache]:
    assert isinstance(engine.verifier, CapturedVerifier)
    return list(engine.verifier._caches)


def fails(*_: object) -> NoReturn:
    raise ZeroDivisionError


def use(engine: Engine, device: Device) -> None:
    """Every drafter, draws, requests that fail, and longer ones than before."""
    for drafter in DRAFTERS:
        if drafter not in BROUGHT_ALONG:
            engine.generate(PROMPTS, max_new_tokens=4, drafter=drafter)
    engine.generate(PROMPTS[0], max_new_tokens=4, temperature=0.8, seed=1, top_p=0.9)
    with suppress(ZeroDivisionError), mock.patch.object(Sampler, "choose", fails):
        engine.generate(PROMPTS[0], max_new_tokens=4)
    device.memory.largest = 30_000
    with suppress(DeviceMemoryError):
        engine.generate(PROMPTS, max_new_tokens=4)
    device.memory.largest = None
    engine.generate(PROMPTS, max_new_tokens=40)


def test_an_engine_that_is_dropped(cuda_stand_in: Device) -> None:
    model = tiny_model("llama").to("cuda")
    base = wrap_model(model)
    small = wrap_model(tiny_model("llama", 1).to("cuda"))
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, draft_model=small)
    with no_garbage_found():
        use(engine, cuda_stand_in)
        caches = caches_of(engine)
        forwards = [one for cache in caches for one in cache.forwards.values()]
        assert forwards
        held: list[weakref.ref[Any]] = [weakref.ref(one) for one in (*caches, *forwards, model)]
        del engine, base, small, model, caches, forwards
        until = time.monotonic() + SOON  # for the thread that made the last step
        while any(one() is not None for one in held) and time.monotonic() < until:
            time.sleep(0.001)
        assert [one() for one in held if one() is not None] == []


def test_a_cache_of_any_verifier() -> None:
    verifier = Verifier(tiny_base("llama"))
    with no_garbage_found():
        cache = verifier.new_cache(1, 16)
        verifier.read_prompts(cache, [0], [PROMPTS[0]])
        keys = weakref.ref(cache.layers[0].keys)
        del cache
        assert keys() is None


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_stand_in")
def test_forwards_over_memory_that_a_cache_has_left() -> None:
    """A cache that grows moves, so what was captured over it is of no use."""
    engine = build_engine(wrap_model(tiny_model("llama").to("cuda")))
    with no_garbage_found():
        engine.generate(PROMPTS[0], max_new_tokens=3)
        (cache,) = caches_of(engine)
        old = [weakref.ref(one) for one in cache.forwards.values()]
        memory = weakref.ref(cache.block)
        assert old
        cache.grow(cache.num_positions + 64)
        assert [one() for one in old if one() is not None] == []
        assert memory() is None
