"""Verifies that our tokens are the base model's own, one by one.

Greedy answers are compared with transformers generate on an untouched second model, sampled ones
with one-node decoding with the same seed. Where the second model is in pieces
(oracle_in_pieces.py), both are held against the token that it chooses at each place. At the first
difference the margin, which is how far the
worse of the two tokens is below the likeliest, tells rounding (below the rounding tolerance,
measured at load) from a bug. A tie of two tokens excuses no third token and no other length.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from medusa_kit import console
from medusa_kit.bench.independent_encoding import EncodingDifference, compare_encodings
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.oracle_in_pieces import Asked, Choice, OracleInPieces
from medusa_kit.engine.engine import Engine, Prompt
from medusa_kit.errors import ConfigError
from medusa_kit.infer.accept.token_choice import TokenChooser
from medusa_kit.infer.cpu.cache_dtype import refuse_float16_cache
from medusa_kit.settings.sampling import SamplingParams

LAYER_BY_LAYER = "transformers, layer by layer"


@dataclass(frozen=True)
class Difference:
    """The first place where an answer differs from the oracle's."""

    prompt: int
    position: int  # in the answer, from 0
    expected: int | None
    actual: int | None
    margin: float  # infinite where one answer has ended
    rounding_tolerance: float

    @property
    def is_rounding(self) -> bool:
        return self.margin < self.rounding_tolerance


@dataclass(frozen=True)
class VerifyReport:
    num_prompts: int
    num_tokens: int
    differences: list[Difference]
    rounding_tolerance: float
    acceptance_length: float
    attention: dict[str, Any]  # the backend asked for, the one in use, and why they differ
    drafter: str
    reference: str  # what answers were held against
    encodings: list[EncodingDifference] = field(default_factory=list)
    encoded_by: str | None = None  # what prompts were held against; None: nothing

    @property
    def failed(self) -> bool:
        """Whether anything differs by more than rounding."""
        return bool(self.bugs or self.encodings)

    @property
    def bugs(self) -> list[Difference]:
        return [difference for difference in self.differences if not difference.is_rounding]

    @property
    def identical(self) -> int:
        return self.num_prompts - len(self.differences)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical, "bugs": len(self.bugs)}


def verify(
    engine: Engine,
    oracle: Oracle | OracleInPieces,
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
            hint="leave out the option acceptance",
        )
    refuse_float16_cache(engine.verifier, "there is nothing to verify")
    # Neither answer may read what the other has left, and whole trees are to be verified.
    engine = replace(engine, batches=None, steps=None)
    differences, asked, num_tokens, num_steps = list[Difference](), list[Asked](), 0, 0
    encoded = [engine.encode(prompt) for prompt in prompts]
    with console.progress("verifying", len(prompts), "prompts") as bar:
        for index, ids in enumerate(encoded):
            ours = engine.generate(
                ids, max_new_tokens=max_new_tokens, drafter=drafter, **asdict(sampling)
            )
            num_tokens += len(ours.token_ids)
            num_steps += ours.stats.num_steps
            if isinstance(oracle, OracleInPieces):
                asked.append(Asked(ids, ours.token_ids))
                bar.advance()
                continue
            expected = _expected(engine, oracle, sampling, ids, max_new_tokens)
            if ours.token_ids != expected:
                differences.append(
                    difference_of(engine, oracle, sampling, index, ids, max_new_tokens,
                                  ours.token_ids, expected)
                )  # fmt: skip
            bar.advance(note=f"{len(differences)} differ")
    if isinstance(oracle, OracleInPieces):
        missed = oracle.misses(asked, max_new_tokens, sampling)
        differences = _differences(missed, tolerance_of(engine, sampling))
    length = (num_tokens - len(prompts)) / num_steps if num_steps else 1.0
    attention = (engine.attention if sampling.greedy else engine.verifier.attention).report()
    return VerifyReport(
        len(prompts),
        num_tokens,
        differences,
        engine.rounding_tolerance,
        length,
        attention,
        drafter or engine.own_drafter,
        _reference(oracle, sampling),
        *compare_encodings(engine.base, prompts, encoded),
    )


def _reference(oracle: Oracle | OracleInPieces, sampling: SamplingParams) -> str:
    if isinstance(oracle, OracleInPieces):
        return LAYER_BY_LAYER
    return "transformers generate" if sampling.greedy else "plain decoding"


def _expected(
    engine: Engine,
    oracle: Oracle,
    sampling: SamplingParams,
    ids: Sequence[int],
    max_new_tokens: int,
) -> list[int]:
    if sampling.greedy:
        return oracle.generate(ids, max_new_tokens)[0]
    plain = engine.generate(
        list(ids), max_new_tokens=max_new_tokens, drafter="none", **asdict(sampling)
    )
    return list(plain.token_ids)


def _differences(missed: Sequence[Sequence[Choice]], tolerance: float) -> list[Difference]:
    """Of each answer that is not the oracle's: where it first differs by more than rounding, else
    where it first differs."""
    found = list[Difference]()
    for prompt, misses in enumerate(missed):
        all_of_it = [
            Difference(prompt, one.position, one.expected, one.actual, one.margin, tolerance)
            for one in misses
        ]
        if all_of_it:
            found.append(next((d for d in all_of_it if not d.is_rounding), all_of_it[0]))
    return found


def tolerance_of(engine: Engine, sampling: SamplingParams) -> float:
    """The rounding tolerance of the scores that tokens are chosen by."""
    scale = 1.0 if sampling.greedy else 1.0 / sampling.temperature
    return engine.rounding_tolerance * scale


def difference_of(
    engine: Engine,
    oracle: Oracle,
    sampling: SamplingParams,
    index: int,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    ours: Sequence[int],
    expected: Sequence[int],
) -> Difference:
    """The first difference of two answers that are not the same."""
    position = first_difference(ours, expected)
    tokens = [ids[position] if position < len(ids) else None for ids in (expected, ours)]
    margin = float("inf")
    if None not in tokens:
        prefix = [*prompt_ids, *expected[:position]]
        chooser = TokenChooser(oracle.base, sampling, prompt_ids, max_new_tokens)
        scores_V = chooser.scores(oracle.logits(prefix), prefix)
        margin = float(scores_V.max() - scores_V[tokens].min())
    tolerance = tolerance_of(engine, sampling)
    return Difference(index, position, tokens[0], tokens[1], margin, tolerance)


def first_difference(ours: Sequence[int], expected: Sequence[int]) -> int:
    """The first position at which two lists differ; the shorter one's length if it is a prefix."""
    for position, (a, b) in enumerate(zip(ours, expected, strict=False)):
        if a != b:
            return position
    return min(len(ours), len(expected))
