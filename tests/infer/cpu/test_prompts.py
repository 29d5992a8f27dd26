"""Reading prompts in C++: the same bits however they are read, and nothing else that runs beside
the kernels."""

import itertools
import threading
from pathlib import Path

import pytest
import torch
from support.small_engines import random_prompt
from support.tiny_models import COMMON, STOP
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.packed.int8_weights import with_weights
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.forest import Forest

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)
TASKS = Path("/proc/self/task")


def base_of(hidden_size: int, window: int | None = None) -> BaseModel:
    sizes = {"hidden_size": hidden_size, "head_dim": 16, "num_attention_heads": 6}
    family = "mistral" if window else "llama"
    arguments = {**COMMON, **sizes, "eos_token_id": STOP, "sliding_window": window}
    config = AutoConfig.for_model(family, **arguments)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    return wrap_model(model, None, family)


def threads_of_torch(work) -> int:
    """How many OpenMP threads `work` starts, called by a thread that has none yet."""
    new: list[set[str]] = []

    def call() -> None:
        torch.set_num_threads(3)
        before = {task.name for task in TASKS.iterdir()}
        work()
        new.append({task.name for task in TASKS.iterdir()} - before)

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    return len(new[0])


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in Linux's /proc")
def test_reading_a_prompt_wakes_no_thread_of_torch(monkeypatch):
    """They would spin for milliseconds where the threads of the kernels should run."""
    if not threads_of_torch(lambda: torch.ones(1 << 20).add_(1)):
        pytest.skip("torch's threads are not started by the thread that needs them")
    monkeypatch.setattr(kernels, "_own_threads", 1)
    base = base_of(hidden_size=768)
    verifier = NativeVerifier(base, native_decoder(base))
    cache = verifier.new_cache(1, 128)
    verifier.read_prompts(cache, [0], [random_prompt(3, seed=1)])  # allocates the cache
    prompt = random_prompt(61, seed=1)
    assert threads_of_torch(lambda: verifier.read_prompts(cache, [0], [prompt])) == 0
    assert cache.lengths[0] == 3 + len(prompt)


@pytest.mark.parametrize("window", [None, 7])
def test_a_prompt_has_the_bits_that_its_tokens_have_as_nodes(window, many_threads):
    """With weights in blocks, which have several kernels: read at once, in pieces, and by steps."""
    base = with_weights(base_of(96, window), "int8")
    verifier = NativeVerifier(base, native_decoder(base))
    prompt = random_prompt(90, seed=2)
    whole, pieces, steps = (verifier.new_cache(1, 96) for _ in range(3))
    expected = verifier.read_prompts(whole, [0], [prompt])
    for start, end in itertools.pairwise((0, 1, 3, 40, 90)):
        layerwise = verifier.read_prompts(pieces, [0], [prompt[start:end]])
    for token in prompt:
        nodes = Forest.chains([[token]], torch.device("cpu"))
        scores = verifier.score(steps, nodes, [0])
        steps.commit([[0]], [0])
    for own in (layerwise, (scores.hidden_ND, scores.logits_NV)):
        assert torch.equal(own[0], expected[0])
        assert torch.equal(own[1], expected[1])
    assert torch.equal(pieces.block, whole.block)
    assert torch.equal(steps.block, whole.block)
