"""What the engine says on a CUDA device is what plain transformers says on the CPU.

The device is a stand-in (support/cuda_stand_in), so that this is tested everywhere. `test_gpu.py`
asks a real one. Every drafter runs there in tests/exactness/test_acceptance_matrix.py.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import cuda_stand_in
from support.cuda_stand_in import Device
from support.partly_knowing import plain_answer
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import CONTEXT, tiny_base, tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.device.captured import CapturedForward
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree

TOKENS = 14
PROMPTS = [random_prompt(7, 1) * 4, random_prompt(5, 2), random_prompt(CONTEXT - 6, 3)]
SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "max_new_tokens": TOKENS}
KINDS = ["medusa", "hydra", "recurrent"]


def plain(family: str, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [plain_answer(family, one, min(TOKENS, CONTEXT - len(one))) for one in prompts]


def on_device(
    family: str, kind: str = "medusa", tree: CandidateTree | DynamicTree = BUSHY, **kinds: Any
) -> Engine:
    base = wrap_model(tiny_model(family).to("cuda"))
    return build_engine(base, heads=random_heads(base, kind=kind, **kinds), tree=tree)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return plain("llama")


@pytest.fixture(scope="module")
def drawn() -> list[list[int]]:
    """A seed's text by plain decoding on the CPU."""
    engine = build_engine(tiny_base("llama"))
    return [one.token_ids for one in engine.generate(PROMPTS, drafter="none", **SAMPLING)]


@pytest.fixture(scope="module")
def device(expected: list[list[int]], drawn: list[list[int]]) -> Iterator[Device]:
    """One for the module, since engines take a while to build; put in after the oracle is asked."""
    with cuda_stand_in.installed() as device:
        yield device


@pytest.fixture(scope="module")
def engine(device: Device) -> Engine:
    engine = on_device("llama")
    engine.draft_model = wrap_model(tiny_model("llama").to("cuda"), None, "the same")
    return engine


def told(results: Any) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_grown_at_each_step(
    kind: str, device: Device, expected: list[list[int]], drawn: list[list[int]]
) -> None:
    engine = on_device("llama", kind, tree=DynamicTree(5, (1.0, 1.0, 1.0)))
    assert told(engine.generate(PROMPTS[:2], max_new_tokens=TOKENS)) == expected[:2]
    assert engine.generate(PROMPTS[1], **SAMPLING).token_ids == drawn[1]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [
    ("gemma3", "recurrent"), ("gpt2", "hydra"), ("mistral-sliding", "medusa"),
])  # fmt: skip
def test_other_families_and_heads(family: str, kind: str, device: Device) -> None:
    engine = on_device(family, kind)
    assert told(engine.generate(PROMPTS[:2], max_new_tokens=TOKENS)) == plain(family)[:2]


@pytest.mark.parametrize("drafter", ["none", "medusa", "auto"])
def test_what_was_read_before_changes_no_token(engine: Engine, drafter: str) -> None:
    text, asked = random_prompt(9, 5), {"max_new_tokens": 6, "drafter": drafter}
    for turn in range(3):
        result = engine.generate(text, **asked)
        assert result.token_ids == plain_answer("llama", text, 6)
        text = [*text, *result.token_ids, *random_prompt(3, turn)]


def test_all_forwards_over_trees_were_captured(engine: Engine, device: Device) -> None:
    """Of the requests above."""
    assert isinstance(engine.verifier, CapturedVerifier)
    assert engine.verifier.num_captured > 0
    assert engine.verifier.num_loose <= engine.verifier.num_captured // 100
    assert device.counts.replays >= engine.verifier.num_captured
    assert device.counts.failed_captures == 0


def test_attention_is_torchs_own_there(engine: Engine) -> None:
    assert engine.generate(PROMPTS[1], max_new_tokens=3).stats.attention == "sdpa"
    assert engine.base.device == torch.device("cuda", 0)


def test_captures_go_on_after_all_graphs_are_gone(
    device: Device, expected: list[list[int]]
) -> None:
    """As those of the check at load are once the garbage collector has run."""
    engine = on_device("llama")
    verifier = engine.verifier
    assert isinstance(verifier, CapturedVerifier)
    for _ in range(2):
        verifier.make_room()
        gc.collect()
        assert told(engine.generate(PROMPTS[:2], max_new_tokens=TOKENS)) == expected[:2]
        assert (verifier.refused, verifier.num_loose) == (None, 0)


def test_a_capture_that_failed_is_tried_again_in_memory_of_its_own(
    device: Device, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain_run = on_device("llama"), CapturedForward.run
    verifier = engine.verifier
    assert isinstance(verifier, CapturedVerifier)
    memory = verifier._memory
    assert memory is not None
    before = memory.pool

    def run(self: CapturedForward) -> None:
        plain_run(self)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("injected")

    monkeypatch.setattr(CapturedForward, "run", run)
    assert told(engine.generate(PROMPTS[:2], max_new_tokens=TOKENS)) == expected[:2]
    assert verifier.refused == "injected"
    monkeypatch.setattr(CapturedForward, "run", plain_run)
    verifier._wait = 0
    assert told(engine.generate(PROMPTS[:2], max_new_tokens=TOKENS)) == expected[:2]
    assert verifier.refused is None
    assert memory.pool != before
