"""Shared fixtures: tiny seeded models of every family, built in code; no network, no GPU."""

import functools
import gc
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
if not torch.cuda.is_available():  # must be set before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from support import cuda_stand_in as stand_in
from support.kernels.compiled import in_wheel
from support.slow_tests import SlowTests
from support.tiny_models import tiny_base

from medusa_kit.base.files import quiet_transformers
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.cpu.binding import kernels

quiet_transformers()
# Each client of HTTP reads all certificates anew, 30 ms of it, though no test uses TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)
if (isa := os.environ.get(kernels.ISA_SWITCH)) and (wheels := in_wheel(isa)):
    kernels.packaged_library = lambda: wheels  # else that level is compiled once more
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started this in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SlowTests(config.rootpath))


def pytest_collection_finish() -> None:
    """A search for garbage looks at what tests make, not at 800,000 objects of what is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _gradients_stay_on() -> Iterator[None]:
    """Else the tests behind it fail, not the one that left them off."""
    yield
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.fixture
def llama() -> BaseModel:
    """A tiny Llama with grouped-query heads, float32."""
    return tiny_base("llama")


@pytest.fixture
def chat_base() -> BaseModel:
    """A tiny Llama with a byte tokenizer and a ChatML template."""
    return load_base_model("debug-tiny", device="cpu")


@pytest.fixture
def cuda_stand_in() -> Iterator[stand_in.Device]:
    """A CUDA device that computes on the host, and counts."""
    with stand_in.installed() as device:
        yield device


@pytest.fixture
def nothing_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package came without the kernels: they are compiled."""
    monkeypatch.setattr(kernels, "packaged_library", lambda: tmp_path / "none.so")


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models through several threads of the C++ kernels too."""
    monkeypatch.setattr(kernels, "WORK_OF_A_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
