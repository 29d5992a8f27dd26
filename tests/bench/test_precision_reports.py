"""Reports of rounded activations: identity within the precision, agreement with float32 beside."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels.rounded_engine import (
    FLOAT32,
    ROUNDED,
    needs_integers,
    quantised_base,
    rounded_engine,
)
from support.small_engines import random_prompt

from medusa_kit.base.model import BaseModel
from medusa_kit.bench.about import About
from medusa_kit.bench.agreement import Agreement
from medusa_kit.bench.bench import Batch, Method, bench
from medusa_kit.bench.layerwise_oracle import Choice, LayerwiseOracle
from medusa_kit.bench.machine import bench_about, write_verify
from medusa_kit.bench.methods import standard_methods
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.report import ONE_NODE, TRANSFORMERS, Answers
from medusa_kit.bench.verify import OwnScores, verify
from medusa_kit.cli import bench_report
from medusa_kit.cli.chat import notes
from medusa_kit.engine.engine import Engine, GenerationResult
from medusa_kit.settings.sampling import SamplingParams

PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((3, 5, 8))]
TOKENS = 12
SAMPLED = SamplingParams(temperature=0.8, seed=3)


class FakeOracle(Oracle):
    """transformers, as far as a report can tell: answers and scores that are made up."""

    def __init__(self, base: BaseModel, answer: Callable[[list[int]], list[int]]) -> None:
        super().__init__(base)
        self._of = answer

    def generate(self, prompt_ids: Any, max_new_tokens: int, **_: Any) -> tuple[list[int], float]:
        return self._of(list(prompt_ids))[:max_new_tokens], 1.0

    def logits(self, ids: Any) -> torch.Tensor:
        raise AssertionError("a margin is told by plain decoding in the same precision")


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    return quantised_base(tmp_path)


def altered(
    monkeypatch: pytest.MonkeyPatch, prompt: list[int], change: Callable[[list[int]], list[int]]
) -> None:
    """Change the drafted answer to one prompt."""
    original = Engine.generate

    def generate(self: Engine, asked: Any, **options: Any) -> GenerationResult:
        result = original(self, asked, **options)
        if asked == prompt and options["drafter"] != "none":
            result = replace(result, token_ids=change(list(result.token_ids)))
        return result

    monkeypatch.setattr(Engine, "generate", generate)


# Sums.


def test_tokens_agree_up_to_the_first_difference() -> None:
    found = Agreement()
    found.compare([[1, 2, 3], [4, 5, 6], [7, 8], [9, 9]], [[1, 2, 3], [4, 0, 6], [7], [9, 9, 9]])
    assert (found.answers, found.same) == (4, 1)
    assert (found.tokens, found.same_tokens) == (10, 3 + 1 + 1 + 2)
    assert found.to_json()["share"] == found.share == 0.7
    said = found.describe("transformers")
    assert "1 of 4 answers are those of transformers; 7 of 10 tokens (70.00%)" in said
    assert Agreement().share == 1.0


# bench


def saying(*answers: list[int]) -> Callable[[Batch], Answers]:
    return lambda batch: Answers([answers[ids[0]] for ids in batch], 1.0)


def made_up(sampled: bool, **first: Any) -> Any:
    """transformers and a peer in float32, ours in int16 with one answer of its own."""
    methods = [
        Method("transformers", saying([1, 2], [3, 4]), **first),
        Method("peer", saying([1, 2], [3, 0])),
        Method("plain", saying([1, 2], [3, 5]), kind="ours", activations="int16"),
        Method("heads", saying([1, 2], [3, 5]), kind="ours", activations="int16"),
        Method("wrong", saying([1, 2], [3, 4]), kind="ours", activations="int16"),
    ]
    return bench(methods, [[0], [1]], 2, sampled=sampled)


def test_answers_are_compared_within_their_precision() -> None:
    report = made_up(sampled=False)
    assert [one.total.identical for one in report.results] == [2, 1, 2, 2, 1]
    assert [one.identical_to for one in report.results] == ["transformers"] * 2 + ["plain"] * 3
    assert report.identical_to == "plain"
    assert report.agreement == Agreement(answers=2, same=1, tokens=4, same_tokens=3)
    record = json.loads(json.dumps(report.to_json()))
    assert record["agreement_with_float32"] == {
        "answers": 2, "same": 1, "tokens": 4, "same_tokens": 3, "share": 0.75}  # fmt: skip
    assert [one["activations"] for one in record["methods"]] == [FLOAT32] * 2 + ["int16"] * 3


@pytest.mark.parametrize(
    ("sampled", "first"), [(True, {}), (False, {"has_ids": False}), (False, {"lossy": True})]
)
def test_agreement_is_of_greedy_answers_in_float32(sampled: bool, first: dict[str, Any]) -> None:
    report = made_up(sampled, **first)
    assert report.agreement is None
    assert report.to_json()["agreement_with_float32"] is None
    assert [one.total.identical for one in report.results][2:] == [2, 2, 1]


def test_float32_has_no_agreement() -> None:
    methods = [Method("transformers", saying([1])), Method("ours", saying([1]), kind="ours")]
    report = bench(methods, [[0]], 1)
    assert (report.agreement, report.identical_to) == (None, "transformers")


def test_a_bench_says_what_was_compared(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(report: Any, temperature: float = 0.0) -> str:
        report.about = About.of("some", SamplingParams(temperature))
        bench_report.show(report, {}, "tiny", "here")
        return " ".join(capsys.readouterr().out.split())

    greedy = shown(made_up(sampled=False))
    assert "equal those of transformers (float32), or plain (int16 activations), token" in greedy
    assert "plain: agreement with float32: 1 of 2 answers are those of transformers;" in greedy
    drawn = shown(made_up(sampled=True), 1.0)
    assert "equal those of plain, token for token; others draw other" in drawn
    assert "agreement with float32: not measured" in drawn
    methods = [Method("transformers", saying([1])), Method("ours", saying([1]), kind="ours")]
    assert "float32" not in shown(bench(methods, [[0]], 1))


@needs_integers
@pytest.mark.parametrize("activations", ROUNDED)
def test_a_bench_of_an_engine(base: BaseModel, activations: str) -> None:
    engine = rounded_engine(base, activations)
    oracle = Oracle.beside(base)
    methods = standard_methods({"ours": engine}, oracle, TOKENS, peers=(), drafters=("medusa",))
    report = bench(methods, PROMPTS, TOKENS)
    assert [one.activations for one in report.results] == [FLOAT32, activations, activations]
    assert [one.total.identical for one in report.results] == [len(PROMPTS)] * 3
    assert [one.identical_to for one in report.results] == [TRANSFORMERS, ONE_NODE, ONE_NODE]
    assert report.agreement is not None
    plain = [engine.generate(ids, max_new_tokens=TOKENS, drafter="none") for ids in PROMPTS]
    expected = Agreement()
    expected.compare([one.token_ids for one in plain],
                     [oracle.generate(ids, TOKENS)[0] for ids in PROMPTS])  # fmt: skip
    assert report.agreement == expected
    about = bench_about({"ours": engine}, "some", SamplingParams())
    assert (about.activations, about.lossy) == (activations, False)


# verify


@needs_integers
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("activations", ROUNDED)
def test_identity_is_counted_within_the_precision(
    base: BaseModel, activations: str, sampling: SamplingParams
) -> None:
    """Whatever transformers says: that is agreement, and no failure."""
    engine = rounded_engine(base, activations)
    oracle = FakeOracle(base, lambda ids: [ids[0]] * TOKENS)
    report = verify(engine, oracle, PROMPTS, max_new_tokens=TOKENS, sampling=sampling)
    assert (report.identical, report.failed) == (len(PROMPTS), False)
    assert report.reference == f"plain decoding with {activations} activations"
    if not sampling.greedy:
        assert report.agreement is None
        return
    assert report.agreement is not None
    answers = [engine.generate(ids, max_new_tokens=TOKENS).token_ids for ids in PROMPTS]
    expected = Agreement()
    expected.compare(answers, [[ids[0]] * TOKENS for ids in PROMPTS])
    assert (report.agreement, expected.same) == (expected, 0)


@needs_integers
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_difference_within_the_precision_is_a_bug(
    base: BaseModel, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle may say the same as the wrong answer."""
    engine = rounded_engine(base, ROUNDED[-1])
    plain = engine.generate(
        PROMPTS[1], max_new_tokens=TOKENS, drafter="none", temperature=sampling.temperature,
        seed=sampling.seed,
    ).token_ids  # fmt: skip
    wrong = [*plain[:2], (plain[2] + 1) % base.info.vocab_size, *plain[3:]]
    oracle = FakeOracle(base, lambda ids: wrong)
    altered(monkeypatch, PROMPTS[1], lambda ids: wrong)
    report = verify(engine, oracle, PROMPTS, max_new_tokens=TOKENS, sampling=sampling,
                    drafter="prompt-lookup")  # fmt: skip
    (bug,) = report.bugs
    assert (bug.prompt, bug.position, bug.expected, bug.actual) == (1, 2, plain[2], wrong[2])
    assert report.failed
    assert report.to_json()["bugs"] == 1


@needs_integers
def test_margins_are_those_of_the_precision(base: BaseModel) -> None:
    """Both the bits of a step of one node, and other bits than another precision's."""
    ids, scored = PROMPTS[2], dict[str, torch.Tensor]()
    for activations in (FLOAT32, *ROUNDED):
        engine = rounded_engine(base, activations)
        scored[activations] = OwnScores(engine).logits(ids)
        (token,) = engine.generate(ids, max_new_tokens=1, drafter="none").token_ids
        assert int(scored[activations].argmax()) == token
    spread = float(scored[FLOAT32].std())
    errors = [float((scored[one] - scored[FLOAT32]).abs().max()) / spread for one in ROUNDED]
    assert 0 < errors[0] < errors[1]


class MadeUpPieces(LayerwiseOracle):
    def __init__(self, missed: list[list[Choice]]) -> None:
        self._missed = missed

    def misses(self, asked: Any, max_new_tokens: int, sampling: SamplingParams) -> Any:
        self.asked = list(asked)
        return self._missed


@needs_integers
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_model_read_layer_by_layer_tells_of_agreement(
    base: BaseModel, sampling: SamplingParams
) -> None:
    engine = rounded_engine(base, ROUNDED[0])
    misses = [Choice(4, 1, 2, 5.0), Choice(7, 1, 2, 5.0)]
    oracle = MadeUpPieces([[], misses, []])
    report = verify(engine, oracle, PROMPTS, max_new_tokens=TOKENS, sampling=sampling)
    tokens = [len(one.answer) for one in oracle.asked]
    assert (report.identical, report.bugs) == (3, [])
    assert report.agreement == Agreement(3, 2, sum(tokens), sum(tokens) - tokens[1] + 4)
    exact = rounded_engine(base, FLOAT32)
    report = verify(exact, oracle, PROMPTS, max_new_tokens=TOKENS, sampling=sampling)
    assert (report.identical, len(report.bugs), report.agreement) == (2, 1, None)


@needs_integers
def test_files_name_the_precision(base: BaseModel, tmp_path: Path) -> None:
    for activations in (FLOAT32, *ROUNDED):
        engine = rounded_engine(base, activations)
        report = verify(engine, Oracle.beside(base), PROMPTS[:1], max_new_tokens=4)
        write_verify({"greedy": report}, engine, "some", tmp_path / "verify.json")
        told = json.loads((tmp_path / "verify.json").read_text())["greedy"]
        assert told["activations"] == activations
        agreement = told["agreement_with_float32"]
        if activations == FLOAT32:
            assert (told["held_to"], agreement) == (
                "plain transformers with checkpoint weights", None)  # fmt: skip
            assert told["identical"] == 1
        else:
            assert told["held_to"] == f"plain decoding with {activations} activations"
            assert (agreement["answers"], agreement["tokens"]) == (1, told["num_tokens"])


# Notes of the command line.


@needs_integers
def test_notes_name_what_is_not_float32(base: BaseModel) -> None:
    for activations in (FLOAT32, *ROUNDED):
        engine = rounded_engine(base, activations)
        stats = engine.generate([5, 6], max_new_tokens=2).stats
        assert (engine.activations, stats.activations) == (activations, activations)
        assert (stats.as_dict()["activations"], stats.lossy) == (activations, False)
        assert engine.lossy_by == []
        name = "" if activations == FLOAT32 else f"{activations} activations"
        assert notes.precision_of(engine) == notes.precision_of(stats) == name
        for note in (notes.rule_note(stats), notes.weights_note(engine)):
            assert note == (f"{note[:2]}{name}" if name else "")
        caveat = notes.quantised_note(engine)
        assert caveat is None if not name else str(caveat).startswith(name)
