"""Reading prompts in C++: what else runs beside the kernels."""

import threading
from pathlib import Path

import pytest
import torch
from support.small_engines import random_prompt
from support.tiny_models import COMMON, STOP
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.base.model import wrap_model
from medusa_kit.infer.cpu import kernels
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.verifier import NativeVerifier

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)
TASKS = Path("/proc/self/task")


def verifier_of(**sizes) -> NativeVerifier:
    arguments = {**COMMON, "head_dim": 16, "num_attention_heads": 6, **sizes}
    config = AutoConfig.for_model("llama", **{**arguments, "eos_token_id": STOP})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    base = wrap_model(model, None, "llama")
    return NativeVerifier(base, native_decoder(base))


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
    verifier = verifier_of(hidden_size=768)
    cache = verifier.new_cache(1, 128)
    verifier.read_prompts(cache, [0], [random_prompt(3, seed=1)])  # allocates the cache
    prompt = random_prompt(61, seed=1)
    assert threads_of_torch(lambda: verifier.read_prompts(cache, [0], [prompt])) == 0
    assert cache.lengths[0] == 3 + len(prompt)
