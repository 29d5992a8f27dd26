"""Methods side by side on the fixed prompts: speeds, ratios with intervals, tokens compared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from medusa_kit.bench.bench import Batch, Method, bench
from medusa_kit.bench.interval import Interval, interval_of
from medusa_kit.bench.methods import standard_methods
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.report import Answers, BenchReport, MethodResult
from medusa_kit.bench.verify import difference_of
from medusa_kit.bench.verify_report import Difference
from medusa_kit.engine.engine import Engine
from medusa_kit.quick.search import plain_step
from medusa_kit.settings.sampling import SamplingParams

Texts = dict[tuple[int, ...], list[int]]  # answer by prompt
MIN_PROMPTS, SHORTEST = 6, 32  # prompts, which an interval needs; new tokens
NUM_KIT_METHODS = 3  # methods of the kit that are measured
PROBE_TOKENS, PROBE_SECONDS = 8, 20.0


@dataclass(frozen=True)
class Size:
    """How much is measured: how many prompts and new tokens, with transformers generate or not."""

    questions: int
    new_tokens: int
    with_transformers: bool = True


def fitting(
    engine: Engine, oracle: Oracle, prompts: Sequence[list[int]], new_tokens: int, seconds: float
) -> Size:
    """The largest size that fits at the speeds of now: fewer tokens first, then fewer prompts, at
    last without transformers."""
    kit_seconds = plain_step(engine, prompts[0])
    oracle.generate(prompts[0], 1)
    tokens, seconds_spent = oracle.generate(prompts[0], PROBE_TOKENS, max_time=PROBE_SECONDS)
    transformers_seconds = seconds_spent / max(1, len(tokens))

    def cost(size: Size) -> float:
        plain = NUM_KIT_METHODS * kit_seconds * (size.questions + 1)
        transformers = transformers_seconds * size.questions if size.with_transformers else 0.0
        return size.new_tokens * (plain + transformers)

    min_prompts = min(MIN_PROMPTS, len(prompts))
    sizes = [
        Size(questions, length, with_transformers)
        for with_transformers in (True, False)
        for questions, length in ((len(prompts), new_tokens),
                                  (len(prompts), min(new_tokens, SHORTEST)),
                                  (min_prompts, min(new_tokens, SHORTEST)))
    ]  # fmt: skip
    return next((size for size in sizes if cost(size) <= seconds), sizes[-1])


@dataclass(frozen=True)
class Comparison:
    """`differences`: of answers that are not the first method's, by the method's name."""

    report: BenchReport
    differences: dict[str, list[Difference]]

    def result(self, name: str) -> MethodResult | None:
        return next((result for result in self.report.ran if result.name == name), None)

    def against(self, name: str, reference: str) -> Interval | None:
        """The ratio of their speeds over the prompts that both answered."""
        result, reference_result = self.result(name), self.result(reference)
        if result is None or reference_result is None:
            return None
        ratios = result.total.ratios(reference_result.total)
        return interval_of([ratio for ratio in ratios if ratio])

    @property
    def wrong(self) -> list[Difference]:
        """The differences that rounding does not explain."""
        return [
            difference
            for differences in self.differences.values()
            for difference in differences
            if not difference.is_rounding
        ]

    @property
    def compared(self) -> int:
        """The number of answers that were compared with the first method's."""
        return sum(result.total.answers for result in self.report.ran[1:])

    @property
    def identical(self) -> int:
        return self.compared - sum(map(len, self.differences.values()))


def compare(
    engines: Mapping[str, Engine],
    oracle: Oracle,
    prompts: Sequence[list[int]],
    size: Size,
    *,
    drafters: Sequence[str],
    enough: Callable[[], bool],
) -> Comparison:
    """Run the methods in turn, greedily, one prompt at a time.

    `oracle`: judges tokens, and is measured as transformers generate where the size says so;
    `enough`: ends the comparison after a prompt.
    """
    measured, new_tokens = oracle if size.with_transformers else None, size.new_tokens
    methods = standard_methods(engines, measured, new_tokens, peers=(), drafters=drafters)
    texts: dict[str, Texts] = {method.name: {} for method in methods}
    recorded = [_recorded(method, texts[method.name]) for method in methods]
    report = bench(recorded, prompts[: size.questions], new_tokens, enough=enough)
    first, *others = [result.name for result in report.ran]
    engine = next(iter(engines.values()))
    differences = {
        name: [
            difference_of(engine, oracle, SamplingParams(), index, prompt, new_tokens,
                          texts[name][tuple(prompt)], texts[first][tuple(prompt)])
            for index, prompt in enumerate(prompts[: report.num_prompts])
            if texts[name][tuple(prompt)] != texts[first][tuple(prompt)]
        ]
        for name in others
    }  # fmt: skip
    return Comparison(report, differences)


def _recorded(method: Method, texts: Texts) -> Method:
    def run(batch: Batch) -> Answers:
        answers = method.run(batch)
        texts.update(zip(map(tuple, batch), answers.token_ids, strict=True))
        return answers

    return replace(method, run=run, warm=not method.ours)  # `fitting` ran the oracle
