"""Bench: transformers generate, its prompt lookup, and ours, interleaved on the same prompts.

Machines are noisy, so every prompt goes through every method in turn (the order rotates) and what
counts is the ratio within one run.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from medusa_kit import console
from medusa_kit.bench.oracle import Oracle
from medusa_kit.infer.engine import Engine

LOOKUP_TOKENS = 10  # transformers' own example value for prompt lookup
# A method answers token ids: (new tokens, seconds, verify steps or None, accepted depth shares).
Method = Callable[[list[int]], tuple[list[int], float, Any]]


@dataclass
class MethodResult:
    """One way of decoding over all prompts."""

    name: str
    tokens: int = 0
    seconds: float = 0.0
    num_steps: int = 0
    depth_steps: list[float] = field(default_factory=list)  # steps that got to depth d at least
    rates: list[float] = field(default_factory=list)  # tokens a second, prompt by prompt
    identical: int = 0  # answers that equal the first method's

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        return (self.tokens - len(self.rates)) / self.num_steps if self.num_steps else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        return [steps / self.num_steps for steps in self.depth_steps]

    def add(self, tokens: list[int], seconds: float, stats: Any) -> None:
        self.tokens += len(tokens)
        self.seconds += seconds
        self.rates.append(len(tokens) / seconds)
        if stats is None:
            return
        self.num_steps += stats.num_steps
        for index, share in enumerate(stats.acceptance_by_depth):
            while len(self.depth_steps) <= index:
                self.depth_steps.append(0.0)
            self.depth_steps[index] += share * stats.num_steps


@dataclass
class BenchReport:
    """Results in the order the methods were given; ratios are to the first."""

    results: list[MethodResult]
    num_prompts: int
    max_new_tokens: int

    def ratio(self, result: MethodResult) -> float:
        return result.tokens_per_second / self.results[0].tokens_per_second

    def median_ratio(self, result: MethodResult) -> float:
        pairs = zip(result.rates, self.results[0].rates, strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def as_dict(self) -> dict[str, Any]:
        methods = [
            {
                **asdict(result),
                "tokens_per_second": result.tokens_per_second,
                "ratio": self.ratio(result),
                "median_ratio": self.median_ratio(result),
                "acceptance_length": result.acceptance_length,
                "acceptance_by_depth": result.acceptance_by_depth,
            }
            for result in self.results
        ]
        return {
            "num_prompts": self.num_prompts,
            "max_new_tokens": self.max_new_tokens,
            "methods": methods,
        }


def transformers_method(oracle: Oracle, max_new_tokens: int, **options: Any) -> Method:
    def run(ids: list[int]) -> tuple[list[int], float, Any]:
        return (*oracle.generate(ids, max_new_tokens, **options), None)

    return run


def engine_method(engine: Engine, max_new_tokens: int, drafter: str | None = None) -> Method:
    def run(ids: list[int]) -> tuple[list[int], float, Any]:
        result = engine.generate(ids, max_new_tokens=max_new_tokens, drafter=drafter)
        return result.token_ids, result.stats.seconds, result.stats

    return run


def bench(
    methods: dict[str, Method], prompts: Sequence[list[int]], max_new_tokens: int
) -> BenchReport:
    """Every prompt (token ids) through every method; the first method is the one compared with."""
    results = [MethodResult(name) for name in methods]
    runs = list(methods.values())
    for run in runs:  # warm up: kernels, packed weights, caches
        run(list(prompts[0]))
    with console.progress("benchmarking", len(prompts), "prompts") as bar:
        for index, ids in enumerate(prompts):
            answers: list[list[int]] = [[] for _ in runs]
            for turn in range(len(runs)):
                which = (index + turn) % len(runs)
                tokens, seconds, stats = runs[which](list(ids))
                results[which].add(tokens, seconds, stats)
                answers[which] = tokens
            for result, answer in zip(results, answers, strict=True):
                result.identical += answer == answers[0]
            best = max(result.tokens_per_second for result in results)
            bar.advance(note=f"best {best / results[0].tokens_per_second:.2f} ×")
    return BenchReport(results, len(prompts), max_new_tokens)


def standard_methods(
    engines: dict[str, Engine], oracle: Oracle, max_new_tokens: int
) -> dict[str, Method]:
    """transformers generate and prompt lookup, our one-node decoding, and each engine's heads."""
    methods = {
        "transformers generate": transformers_method(oracle, max_new_tokens),
        "transformers prompt lookup": transformers_method(
            oracle, max_new_tokens, prompt_lookup_num_tokens=LOOKUP_TOKENS
        ),
    }
    first = next(iter(engines.values()))
    methods["medusa-kit, one node"] = engine_method(first, max_new_tokens, "none")
    for name, engine in engines.items():
        if engine.heads is not None:
            methods[name] = engine_method(engine, max_new_tokens)
    return methods
