"""Verify against a model that is read layer by layer says what it says against a whole one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_engines import engine_with_heads
from support.tiny_models import STOP, VOCAB, tiny_model

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.bench import layerwise_oracle
from medusa_kit.bench.layerwise_oracle import LayerwiseOracle, oracle_beside
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.verify import verify
from medusa_kit.bench.verify_report import VerifyReport
from medusa_kit.engine.engine import Engine, GenerationResult
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.cpu.packed.int8_weights import with_weights
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree

PROMPTS = [[5, 6, 7], [40, 41], [11, 90, 33, 8]]
TOKENS = 8
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def loaded(folder: Path, **options: Any) -> BaseModel:
    return load_base_model(str(folder), device="cpu", dtype="float32", **options)


def engine_of(base: BaseModel) -> Engine:
    engine = engine_with_heads(base, CandidateTree([(0,), (1,), (0, 0), (0, 1)]), num_heads=2)
    engine.check = replace(engine.check, rounding_tolerance=1e-3)
    return engine


def both(folder: Path, sampling: SamplingParams | None) -> tuple[VerifyReport, VerifyReport]:
    """Reports of verify against the model in pieces, and against the whole one."""
    engine = engine_of(loaded(folder))
    oracles = LayerwiseOracle.beside(engine.base), Oracle.beside(engine.base)
    pieces, whole = (
        verify(engine, oracle, PROMPTS, max_new_tokens=TOKENS, sampling=sampling)
        for oracle in oracles
    )
    return pieces, whole


def alter(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[int]], list[int]]) -> None:
    """Change the engine's drafted answer to the second prompt."""
    original = Engine.generate

    def generate(self: Engine, asked: Any, **options: Any) -> GenerationResult:
        result = original(self, asked, **options)
        if asked == PROMPTS[1] and options["drafter"] != "none":
            result = replace(result, token_ids=change(list(result.token_ids)))
        return result

    monkeypatch.setattr(Engine, "generate", generate)


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_a_sound_engine_is_identical(folder: Path, sampling: SamplingParams | None) -> None:
    pieces, whole = both(folder, sampling)
    assert pieces.differences == []
    assert pieces.reference == "transformers, layer by layer"
    assert whole.reference == ("plain decoding" if sampling else "transformers generate")
    assert replace(pieces, reference=whole.reference) == whole


def wrong_token(ids: list[int]) -> list[int]:
    return [*ids[:2], (ids[2] + 1) % VOCAB, *ids[3:]]


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "change",
    [wrong_token, lambda ids: ids[:-1], lambda ids: [*ids, 9], lambda ids: []],
    ids=["wrong", "short", "long", "none"],
)
def test_another_answer_is_the_same_bug(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: SamplingParams | None,
    change: Callable[[list[int]], list[int]],
) -> None:
    alter(monkeypatch, change)
    (found,), (expected,) = (report.bugs for report in both(folder, sampling))
    assert found.margin == pytest.approx(expected.margin, abs=1e-4)
    assert replace(found, margin=expected.margin) == expected


def test_what_follows_the_stop_token_is_a_bug(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = loaded(folder)
    stop = engine_of(base).generate(PROMPTS[1], max_new_tokens=TOKENS).token_ids[3]
    assert stop != STOP
    base.model.generation_config.eos_token_id = stop
    base.model.generation_config.save_pretrained(folder)
    assert [len(report.differences) for report in both(folder, None)] == [0, 0]
    alter(monkeypatch, lambda ids: [*ids, 9])
    (found,), (expected,) = (report.bugs for report in both(folder, None))
    assert found == expected
    assert found.expected is None


def nearly_tied(share: float) -> tuple[Any, int]:
    """(a model whose last token is nearly as likely as another, that other one, which its first
    answer begins with)."""
    model = tiny_model("llama")
    with torch.no_grad():
        token = int(model(torch.tensor([PROMPTS[1]])).logits[0, -1].argmax())
        model.lm_head.weight[VOCAB - 1] = model.lm_head.weight[token] * (1 + share)
    return model, token


def test_after_a_near_tie_the_rest_is_still_held_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearly_tied(-1e-6)[0].save_pretrained(tmp_path)
    oracle = LayerwiseOracle.beside(loaded(tmp_path))
    model, token = nearly_tied(1e-6)
    engine = engine_of(wrap_model(model))
    report = verify(engine, oracle, PROMPTS, max_new_tokens=TOKENS)
    (difference,) = report.differences
    assert (difference.prompt, difference.position) == (1, 0)
    assert (difference.expected, difference.actual) == (token, VOCAB - 1)
    assert difference.is_rounding
    assert report.bugs == []
    alter(monkeypatch, wrong_token)
    (bug,) = verify(engine, oracle, PROMPTS, max_new_tokens=TOKENS).bugs
    assert bug.position == 2


def test_rounded_weights_are_those_of_the_rounded_model(tmp_path: Path) -> None:
    """Inputs of 48 numbers are left as they are, and so is a tied input embedding."""
    tiny_model("llama-tied").save_pretrained(tmp_path)
    base = with_weights(loaded(tmp_path), "int8")
    oracle = LayerwiseOracle.beside(base, same_weights=True)
    with torch.no_grad():
        expected_V = base.model(torch.tensor(PROMPTS[:1])).logits[0, -1]
    found_V = oracle.pieces.last_logits(PROMPTS[:1])[0]
    torch.testing.assert_close(found_V, expected_V, atol=1e-4, rtol=1e-4)
    plain_V = LayerwiseOracle.beside(base).pieces.last_logits(PROMPTS[:1])[0]
    assert (plain_V - expected_V).abs().max() > 1e-3


def test_memory_decides_unless_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    base = loaded(folder)
    assert isinstance(oracle_beside(base), Oracle)
    assert isinstance(oracle_beside(base, layerwise=True), LayerwiseOracle)
    monkeypatch.setattr(layerwise_oracle, "free_memory", lambda: 7 * base.info.num_parameters)
    assert isinstance(oracle_beside(base), LayerwiseOracle)
    assert "it is read layer by layer" in capsys.readouterr().err
    assert isinstance(oracle_beside(base, layerwise=False), Oracle)
    half = load_base_model(str(folder), device="cpu", dtype="bfloat16")
    assert isinstance(oracle_beside(half), Oracle)


def test_a_family_that_cannot_be_in_pieces_is_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    base = loaded(tmp_path)
    monkeypatch.setattr(layerwise_oracle, "free_memory", lambda: 0)
    assert isinstance(oracle_beside(base), Oracle)
    assert "loaded whole: 'gpt2' cannot be run layer by layer" in capsys.readouterr().err
    with pytest.raises(IncompatibleBaseError, match="'gpt2' cannot be run layer by layer"):
        oracle_beside(base, layerwise=True)


def test_what_has_no_checkpoint_is_told() -> None:
    base = wrap_model(tiny_model("llama"))
    with pytest.raises(IncompatibleBaseError, match="cannot be verified layer by layer") as caught:
        oracle_beside(base, layerwise=True)
    assert "--layer-by-layer" in str(caught.value.hint)
