"""Verifies that our tokens are the base model's own, one by one.

Greedy answers are compared with transformers generate on an untouched second model, sampled ones
with one-node decoding with the same seed. Where the second model is in pieces
(layerwise_oracle.py), both are compared with the token that it chooses at each position. At the
first difference the margin, which is how far the worse of the two tokens is below the likeliest,
separates rounding (below the rounding tolerance, measured at load) from a bug. A tie of two tokens
excuses no third token and no other length.

With rounded activations all are compared with one-node decoding in the same precision, and how far
they agree with float32, which is the second model's, is counted beside that.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Protocol

from torch import Tensor

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.bench.agreement import Agreement, first_difference
from medusa_kit.bench.independent_encoding import compare_encodings
from medusa_kit.bench.layerwise_oracle import AnsweredPrompt, Choice, LayerwiseOracle
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.report import TRANSFORMERS
from medusa_kit.bench.time_needed import say_how_long
from medusa_kit.bench.verify_report import LAYER_BY_LAYER, Difference, VerifyReport
from medusa_kit.engine.engine import Engine, Prompt
from medusa_kit.errors import ConfigError
from medusa_kit.infer.cpu.cache_dtype import refuse_float16_cache
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.settings.sampling import SamplingParams

BY_FIRST = "as long as the first prompt each"


class Scores(Protocol):
    """The scores that give the margin between two tokens."""

    @property
    def base(self) -> BaseModel: ...

    def logits(self, ids: Sequence[int]) -> Tensor:
        """logits_V after the last token."""
        ...


def verify(
    engine: Engine,
    oracle: Oracle | LayerwiseOracle,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    sampling: SamplingParams | None = None,
    drafter: str | None = None,
) -> VerifyReport:
    """Compare every answer token by token; greedy unless `sampling` says otherwise. Prompts that
    are text are held against another encoding, where the base has one.

    Raises ConfigError for a lossy acceptance rule or cache, which promise no particular tokens.
    """
    sampling = sampling or SamplingParams()
    if sampling.lossy:
        raise ConfigError(
            "typical acceptance is lossy, so there is nothing to verify; expected exact acceptance",
            hint="leave out --acceptance",
        )
    refuse_float16_cache(engine.verifier, "there is nothing to verify")
    # Neither answer may read what the other has left, and whole trees are to be verified.
    engine = replace(engine, scheduler=Scheduler(engine.verifier))
    judge = _Judge(engine, oracle, sampling, max_new_tokens)
    began = time.monotonic()
    doing = "verifying" if sampling.greedy else "verifying sampled answers"
    num_steps, encoded = 0, [engine.encode(prompt) for prompt in prompts]
    with console.progress(doing, len(prompts), "prompts") as bar:
        for ids in encoded:
            result = engine.generate(
                ids, max_new_tokens=max_new_tokens, drafter=drafter, **asdict(sampling)
            )
            num_steps += result.stats.num_steps
            judge.compare(ids, result.token_ids)
            if len(judge.answered) == 1:
                say_how_long((time.monotonic() - began) * len(prompts), BY_FIRST)
            bar.advance(note=f"{len(judge.differences)} differ" if judge.at_once else "")
    judge.compare_layerwise()
    num_tokens = sum(len(answered.answer) for answered in judge.answered)
    length = (num_tokens - len(prompts)) / num_steps if num_steps else 1.0
    attention = (engine.attention if sampling.greedy else engine.verifier.attention).report()
    return VerifyReport(
        len(prompts),
        num_tokens,
        judge.differences,
        engine.rounding_tolerance,
        length,
        attention,
        drafter or engine.own_drafter,
        judge.reference,
        *compare_encodings(engine.base, prompts, encoded),
        judge.agreement,
    )


class _Judge:
    """Compares answers with what they are to be, one after another."""

    def __init__(
        self,
        engine: Engine,
        oracle: Oracle | LayerwiseOracle,
        sampling: SamplingParams,
        max_new_tokens: int,
    ) -> None:
        self._engine, self._oracle = engine, oracle
        self._sampling, self._max_new_tokens = sampling, max_new_tokens
        self._rounded = engine.activations != FLOAT32
        self._layerwise = isinstance(oracle, LayerwiseOracle)
        self.answered, self.differences = list[AnsweredPrompt](), list[Difference]()
        agrees = self._rounded and (self._layerwise or sampling.greedy)
        self.agreement = Agreement() if agrees else None

    @property
    def at_once(self) -> bool:
        """Whether differences are known after each answer."""
        return self._rounded or not self._layerwise

    @property
    def reference(self) -> str:
        if self._rounded:
            return f"plain decoding with {self._engine.activations} activations"
        if self._layerwise:
            return LAYER_BY_LAYER
        return TRANSFORMERS if self._sampling.greedy else "plain decoding"

    def compare(self, ids: list[int], answer: Sequence[int]) -> None:
        number = len(self.answered)
        self.answered.append(AnsweredPrompt(ids, answer))
        if not self.at_once:
            return
        by_engine = self._rounded or not self._sampling.greedy
        expected = self._plain(ids) if by_engine else self._generated(ids)
        if list(answer) != expected:
            scores: Scores = OwnScores(self._engine) if self._rounded else self._whole
            self.differences.append(
                difference_of(self._engine, scores, self._sampling, number, ids,
                              self._max_new_tokens, answer, expected)
            )  # fmt: skip
        if self.agreement is not None and not self._layerwise:
            self.agreement.compare([answer], [self._generated(ids)])

    def compare_layerwise(self) -> None:
        """Compare all answers at once, where the second model is in pieces."""
        if not isinstance(self._oracle, LayerwiseOracle):
            return
        missed = self._oracle.misses(self.answered, self._max_new_tokens, self._sampling)
        if self.agreement is None:
            self.differences = _differences(missed, tolerance_of(self._engine, self._sampling))
            return
        for answered, misses in zip(self.answered, missed, strict=True):
            self.agreement.add(len(answered.answer), misses[0].position if misses else None)

    @property
    def _whole(self) -> Oracle:
        assert isinstance(self._oracle, Oracle)
        return self._oracle

    def _generated(self, ids: Sequence[int]) -> list[int]:
        return self._whole.generate(ids, self._max_new_tokens)[0]

    def _plain(self, ids: list[int]) -> list[int]:
        options = asdict(self._sampling)
        plain = self._engine.generate(
            ids, max_new_tokens=self._max_new_tokens, drafter="none", **options
        )
        return list(plain.token_ids)


class OwnScores:
    """The scores of an engine's own plain decoding, in its precision."""

    def __init__(self, engine: Engine) -> None:
        self.base, self._verifier = engine.base, engine.verifier

    def logits(self, ids: Sequence[int]) -> Tensor:
        """logits_V after the last token."""
        cache = self._verifier.new_cache(1, len(ids))
        return self._verifier.read_prompts(cache, [0], [list(ids)])[1][0]


def _differences(missed: Sequence[Sequence[Choice]], tolerance: float) -> list[Difference]:
    """A difference of each answer that is not the oracle's: the first by more than rounding, else
    the first."""
    differences = list[Difference]()
    for prompt, misses in enumerate(missed):
        of_answer = [
            Difference(prompt, miss.position, miss.expected, miss.actual, miss.margin, tolerance)
            for miss in misses
        ]
        if of_answer:
            differences.append(next((d for d in of_answer if not d.is_rounding), of_answer[0]))
    return differences


def tolerance_of(engine: Engine, sampling: SamplingParams) -> float:
    """The rounding tolerance of the scores that tokens are chosen by."""
    scale = 1.0 if sampling.greedy else 1.0 / sampling.temperature
    return engine.rounding_tolerance * scale


def difference_of(
    engine: Engine,
    by: Scores,
    sampling: SamplingParams,
    index: int,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    actual: Sequence[int],
    expected: Sequence[int],
) -> Difference:
    """The first difference of two answers that are not the same. `by`: gives the margin."""
    position = first_difference(actual, expected)
    tokens = [ids[position] if position < len(ids) else None for ids in (expected, actual)]
    margin = float("inf")
    if None not in tokens:
        prefix = [*prompt_ids, *expected[:position]]
        sampler = Sampler(by.base, sampling, prompt_ids, max_new_tokens)
        scores_V = sampler.scores(by.logits(prefix), prefix)
        margin = float(scores_V.max() - scores_V[tokens].min())
    tolerance = tolerance_of(engine, sampling)
    return Difference(index, position, tokens[0], tokens[1], margin, tolerance)
