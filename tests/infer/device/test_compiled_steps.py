"""Compiled forwards in steps of fixed shapes: compiled for every shape, in one piece, and held
against the plain forward where a compiler might go wrong.

torch.compile is the real one with a back end that runs what it is given and counts, or a stand-in.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_engines import build_engine, random_heads, random_prompt
from support.tiny_models import VOCAB, coarse_base, tiny_base, tiny_model

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.device.compiled import compiled_forward
from medusa_kit.infer.device.step import FixedStep
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.forest import Forest

PROMPT = random_prompt(19, 19)
COMPILED = "torch.compile, fixed shapes (sdpa)"


def base_of(family: str, **changes: Any) -> BaseModel:
    return wrap_model(tiny_model(family, **changes))


def compiling_verifier(base: BaseModel, backend: Any = "inductor") -> CapturedVerifier:
    attention = AttentionChoice(fixed_shapes=True)
    return CapturedVerifier(base, attention, lambda: compiled_forward(base, backend))


def one_step(verifier: CapturedVerifier, counts: list[int]) -> Any:
    rows = range(len(counts))
    cache = verifier.new_cache(len(counts), 64)
    verifier.read_prompts(cache, rows, [PROMPT] * len(counts))
    nodes = Forest.chains([[5] * count for count in counts], verifier.base.device)
    return verifier.score(cache, nodes, rows)


def compiling_engine(family: str, **changes: Any) -> Engine:
    base = base_of(family, **changes)
    return build_engine(base, heads=random_heads(base), fixed_shapes="always", compiled=True)


class Counter:
    """A back end: the graphs it was given, and how often they ran."""

    def __init__(self) -> None:
        self.graphs, self.runs = 0, 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.mark.slow
def test_every_shape_runs_compiled() -> None:
    """More shapes than torch keeps of one function: what is over runs uncompiled by its default.
    The model is handed out, so that its modules are watched."""
    counter = Counter()
    verifier = compiling_verifier(base_of("llama", num_hidden_layers=1), counter)
    with torch._dynamo.config.patch(recompile_limit=1), torch.inference_mode():
        for counts in ([1], [3], [1, 1], [2, 5]):
            counter.graphs = counter.runs = 0
            one_step(verifier, counts)
            assert (counter.graphs, counter.runs) == (1, 2)  # held to the plain one, then run


@pytest.mark.slow
def test_what_does_not_compile_in_one_piece_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    head_logits = BaseModel.head_logits

    def broken(self: BaseModel, hidden: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return head_logits(self, hidden)

    monkeypatch.setattr(BaseModel, "head_logits", broken)
    with pytest.raises(ConfigError, match=r"compile was asked for, but .* torch.compile failed: "):
        compiling_engine("llama", num_hidden_layers=1)


def stand_in_for_compile(monkeypatch: pytest.MonkeyPatch, changed: Callable[..., Any]) -> list[Any]:
    """torch.compile that calls `changed` with the forward; the options of each call."""
    calls: list[Any] = []

    def stand_in(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            calls.append(options)
            return changed(forward, *args, **kwargs)

        return compiled

    monkeypatch.setattr(torch, "compile", stand_in)
    return calls


@pytest.mark.slow
def test_a_compiled_forward_runs_the_steps_and_its_rounding_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    off_by = 1e-5

    def rounded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden, logits = forward(*args, **kwargs)
        return hidden, logits + off_by * (torch.arange(VOCAB) == 7)

    plain = build_engine(base_of("gemma3"), fixed_shapes="always")
    expected = plain.generate(PROMPT, max_new_tokens=12)
    calls = stand_in_for_compile(monkeypatch, rounded)
    engine = compiling_engine("gemma3")
    # Doubled, and measured with the compiled forward.
    assert engine.rounding_tolerance > plain.rounding_tolerance + off_by
    result = engine.generate(PROMPT, max_new_tokens=12)
    assert result.token_ids == expected.token_ids
    assert result.stats.steps_run_by == COMPILED
    assert calls[0] == {"dynamic": False, "fullgraph": True, "backend": "inductor"}
    assert len(calls) > result.stats.num_steps
    off_by = 1e-4
    engine.generate([PROMPT, PROMPT], max_new_tokens=4)
    stats = engine.generate(PROMPT, max_new_tokens=4).stats
    assert stats.rounding_tolerance == engine.rounding_tolerance > 1.9e-4
    off_by = 10.0
    wrong = engine.generate([PROMPT] * 5, max_new_tokens=4)
    assert {one.stats.steps_run_by[:42] for one in wrong} == {
        "torch (not captured: the compiled forward "[:42]
    }
    assert all(one.token_ids == expected.token_ids[:4] for one in wrong)


@pytest.mark.parametrize("wrong", ["windows", "the prefix"])
def test_what_goes_wrong_after_a_prefix_alone_is_found(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = FixedStep._build_mask

    def mask(self: FixedStep, window: int | None) -> torch.Tensor:
        mask_BNS = build(self, None if wrong == "windows" else window)
        if wrong == "the prefix":
            newest_B1 = self.device_lengths()[:, None] - 1
            mask_BNS = mask_BNS & (torch.arange(self.num_positions) != newest_B1)[:, None]
        return mask_BNS

    def changed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(FixedStep, "_build_mask", mask)
            return forward(*args, **kwargs)

    stand_in_for_compile(monkeypatch, changed)
    broken = True
    with pytest.raises(ConfigError, match=r"compile was asked for, but .* the compiled forward"):
        compiling_engine("mistral-sliding")


def test_a_compiled_forward_may_round_as_coarsely_as_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rounded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden, logits = forward(*args, **kwargs)
        return hidden, logits + 0.2 * logits.std() * (torch.arange(VOCAB) == 7)

    stand_in_for_compile(monkeypatch, rounded)
    bases = [coarse_base(torch.bfloat16), tiny_base("llama", dtype=torch.bfloat16)]
    coarse, fine = (compiling_verifier(base) for base in bases)
    one_step(coarse, [2, 1])
    assert coarse.refused is None
    assert coarse.rounding_tolerance > 0
    one_step(fine, [2, 1])
    assert fine.refused is not None
    assert "compiled forward" in fine.refused
