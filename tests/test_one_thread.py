"""Tokens are chosen by the calling thread alone, and nothing else notices."""

import os
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_base

from medusa_kit import one_thread as module
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.one_thread import one_thread
from medusa_kit.settings.sampling import SamplingParams

known = pytest.mark.skipif(
    not (hasattr(os, "RTLD_NOLOAD") and any(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))),
    reason="this torch brings no libgomp, so threads stay as they are",
)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_another_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@known
def test_only_the_calling_thread_is_alone(two_threads: None) -> None:
    with one_thread():
        assert (torch.get_num_threads(), in_another_thread()) == (1, 2)
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert (torch.get_num_threads(), in_another_thread()) == (2, 2)


@known
def test_threads_come_back_after_an_error(two_threads: None) -> None:
    with pytest.raises(ValueError, match="odd"), one_thread():
        raise ValueError("odd")
    assert torch.get_num_threads() == 2


def test_without_the_library_nothing_changes(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "RTLD_NOLOAD", raising=False)  # as on Windows
    anew = runpy.run_path(module.__file__)
    with anew["one_thread"]():
        assert torch.get_num_threads() == 2


@known
@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_tokens_are_chosen_alone(two_threads: None, temperature: float) -> None:
    seen: list[int] = []

    def processor(ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return scores_BV

    params = SamplingParams(temperature, seed=3)
    sampler = Sampler(tiny_base("llama"), params, [1, 2], 8, processors=[processor])
    logits_V = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    alone = sampler.choose(logits_V, [1, 2, 3])
    assert seen == [1]
    assert alone == int(sampler.scores(logits_V, [1, 2, 3]).argmax())
    assert seen == [1, 2]
