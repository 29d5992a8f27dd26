"""Steps that may not read on the host, and what plain transformers answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from medusa_kit.infer.device.guard import HostRead, NoHostReads
from support.tiny_models import tiny_model


def plain_answers(
    family: str, prompts: list[list[int]], tokens: int, few: bool = False
) -> list[list[int]]:
    """What generate says, one prompt at a time; with `few` the model of `few_words`."""
    return [list(_plain_answer(family, tuple(prompt), tokens, few)) for prompt in prompts]


@cache
def _plain_answer(family: str, prompt: tuple[int, ...], tokens: int, few: bool) -> list[int]:
    """One model and many prompts, which several tests ask for."""
    ids = torch.tensor([prompt])
    out = _model(family, few).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@cache
def _model(family: str, few: bool) -> Any:
    return few_words(family) if few else tiny_model(family)


def few_words(family: str) -> Any:
    """A model of few tokens that never stops by itself."""
    model = tiny_model(family, vocab_size=14)
    model.generation_config.eos_token_id = None
    return model


@contextmanager
def no_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The guard, and every way by which Python gets at a tensor's values."""

    def refuse(name: str) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            raise HostRead(f"Tensor.{name}")

        return read

    with monkeypatch.context() as patch, NoHostReads():
        for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse(name))
        yield
