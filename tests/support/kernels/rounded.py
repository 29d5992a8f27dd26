"""Engines whose activations are rounded, what they should say, and how many of the cases to run.

Shapes: V vocabulary.
"""

import functools
import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.cpu.activations import activations_of
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.verifier import Verifier
from support.gguf import tiny_files
from support.gguf.blocks import HALVES, random_rows
from support.small_engines import build_engine, random_heads
from support.tiny_models import MODELS, model_of

ALL = os.environ.get("MEDUSA_KIT_PRECISIONS") == "all"  # make test-precisions
PRECISIONS = ("int16", "int8")
CONTEXT = 320  # of the models here; more than one C++ call reads of a prompt
# Every matrix in eight bits, but for one family whose MLP has 48 inputs: those stay floats.
ROUNDED = {name: ({} if name == "qwen2" else {"intermediate_size": 64}) for name in MODELS}
for name in ("gemma3", "gemma3-capped"):  # tied, they say one token for ever
    ROUNDED[name]["tie_word_embeddings"] = False
ROUNDED["llama-tied"] = {"intermediate_size": 64, "tie_word_embeddings": True}
# Matrices of a GGUF file, and the factors that keep its random weights small.
STORED = {"Q4_K": (5e-4, 3.7e-3), "Q6_K": (8e-5,), "Q8_0": (1e-3,), "Q4_1": (0.02, -0.15),
          "Q5_K": (2.4e-4, 3.7e-3)}  # fmt: skip
KINDS = (*ROUNDED, *STORED)
T = TypeVar("T")


def multiplies_integers() -> bool:
    library = kernels.load_library()
    return library is not None and kernels.has_integers(library)


def some(cases: Sequence[T], count: int) -> list[T]:
    """A seeded sample in order, or all of them for `make test-precisions`."""
    picked = range(len(cases))
    if not ALL and count < len(cases):
        picked = sorted(random.Random(len(cases)).sample(picked, count))
    return [cases[index] for index in picked]


@functools.cache
def gguf_file(kind: str) -> Path:
    """A tiny Llama whose matrices are random blocks of this kind."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": CONTEXT}
    model = tiny_files.tiny_model("llama", **sizes)
    blocks = dict[str, Any]()
    for number, (name, array) in enumerate(tiny_files._tensors(model, "llama", "llama").items()):
        if array.ndim == 2 and name != "token_embd.weight":
            raw = random_rows(kind, *array.shape, seed=number)
            blocks[name] = (_with_factors(raw, kind), kind)
        elif array.ndim == 2:
            blocks[name] = 8 * array
    folder = Path(os.environ["MEDUSA_KIT_CACHE"])  # a test's own, see tests/precisions/conftest.py
    folder.mkdir(parents=True, exist_ok=True)
    return tiny_files.write_model(folder / f"{kind}.gguf", "llama", model, more=blocks)[0]


def _with_factors(raw: np.ndarray, kind: str) -> np.ndarray:
    size = tiny_files.gguf.GGML_QUANT_SIZES[tiny_files.gguf.GGMLQuantizationType[kind]][1]
    blocks_XS = raw.reshape(-1, size)
    for place, factor in zip(HALVES[kind], STORED[kind], strict=True):
        blocks_XS[:, place : place + 2] = np.float16([factor]).view(np.uint8)
    return raw


def base_of(kind: str) -> BaseModel:
    """One that nothing decodes with yet."""
    if kind in STORED:
        return base_for_decoding(str(gguf_file(kind)), device="cpu")
    name = kind.removesuffix("-tied")
    changes = {**ROUNDED[kind], "max_position_embeddings": CONTEXT}
    return wrap_model(model_of(name, **changes), None, kind)


def weights_for(kind: str) -> dict[str, Any]:
    return {} if kind in STORED else {"weights": "int8"}


def engine_of(kind: str, activations: str, heads: Any = None, **options: Any) -> Engine:
    """`heads`: arguments of `random_heads`, or None for none."""
    base = base_of(kind)
    given = {"heads": None if heads is None else random_heads(base, **heads), **options}
    engine = build_engine(base, **weights_for(kind), activations=activations, **given)
    assert activations_of(engine.verifier) == activations
    return engine


def draft_model_for(kind: str) -> BaseModel:
    """The same weights, in float32 and by torch or C++: it is right now and then, not always."""
    if kind in STORED:
        return load_base_model(str(gguf_file(kind)), device="cpu")
    return base_of(kind)


def logits_after(verifier: Verifier, text: Sequence[int]) -> list[Tensor]:
    """logits_V after each token, read one by one: nothing else is in any call."""
    cache, found = verifier.new_cache(1, len(text)), list[Tensor]()
    with torch.inference_mode():
        for token in text:
            found.append(next_logits(verifier, cache, token))
    return found


def plainly(verifier: Verifier, prompt: Sequence[int], tokens: int) -> list[int]:
    """The greedy answer with one node a step, the prompt's tokens included."""
    room = min(tokens, verifier.base.info.context_length - len(prompt))
    cache, answer = verifier.new_cache(1, len(prompt) + tokens), list[int]()
    with torch.inference_mode():
        for token in prompt[:-1]:
            next_logits(verifier, cache, token)
        last = prompt[-1]
        for _ in itertools.repeat(None, room):
            last = int(next_logits(verifier, cache, last).argmax())
            answer.append(last)
            if last in verifier.base.stop_token_ids:
                break
    return answer


def next_logits(verifier: Verifier, cache: Any, token: int) -> Tensor:
    """logits_V after one more token of a cache of one row."""
    one = Forest.chains([[token]], torch.device("cpu"))
    logits_V = verifier.score(cache, one, [0]).logits_NV[0].clone()
    cache.commit([range(1)], [0])
    return logits_V
