"""Bench: compares decoding methods (methods.py), interleaved on the same prompts.

Timings jitter, so every batch of prompts goes through every method in turn, in rotating order, and
ratios within one run are what counts.
"""

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from medusa_kit import console
from medusa_kit.bench.agreement import Agreement
from medusa_kit.errors import DataError, MedusaKitError
from medusa_kit.settings.engine import FLOAT32

Batch = list[list[int]]  # token ids of each prompt
UNCATEGORISED = "(none)"


@dataclass(frozen=True)
class Decoding:
    """Tokens after the first step, which reads the prompt, and their seconds."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Answers:
    """New tokens of each prompt of a batch, the seconds for all, and statistics of steps."""

    token_ids: list[list[int]]
    seconds: float
    stats: Sequence[Any] = ()  # GenerationStats of each prompt, where a method has them
    decoding: Decoding | None = None  # where a method measures it
    counts: Sequence[int] | None = None  # of tokens, where they are not those of token_ids
    step_tokens: int | None = None  # tokens from steps; None: all but each answer's first
    failed: Collection[int] = ()  # places in the batch that got no answer; no tokens, no seconds
    said: Sequence[str] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids) if self.counts is None else self.counts)

    @property
    def notes(self) -> list[str]:
        """Notes of the method, or of the drafter about the last prompt."""
        if self.said:
            return list(self.said)
        return list(getattr(self.stats[-1], "drafter_notes", ())) if self.stats else []


@dataclass(frozen=True)
class Method:
    """A decoding method. `ours`: all methods of ours give the same text for a seed.

    `warm`: needs no warm-up round. `has_ids`: answers come with token ids, which can be compared.
    `lossy`: answers are another model's and never count as identical. `activations`: the precision;
    those in another one than the first method's are compared with our first in the same.
    """

    name: str
    run: Callable[[Batch], Answers]
    ours: bool = False
    warm: bool = False
    has_ids: bool = True
    lossy: bool = False
    activations: str = FLOAT32


@dataclass
class Tally:
    """The sums of a method over some batches."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    num_steps: int = 0
    step_tokens: int = 0
    depth_steps: list[float] = field(default_factory=list)  # steps that reached at least depth d
    # Tokens a second of each batch; None where all its prompts failed.
    rates: list[float | None] = field(default_factory=list)
    identical: int | None = 0  # answers that equal the reference's; None: not to be compared
    decoding_tokens: int = 0  # after the first step
    decoding_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decoding_tokens_per_second(self) -> float | None:
        """Without the time for reading prompts; None where a method does not report it."""
        if not self.decoding_tokens or not self.decoding_seconds:
            return None
        return self.decoding_tokens / self.decoding_seconds

    @property
    def acceptance_length(self) -> float | None:
        return self.step_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        return [steps / self.num_steps for steps in self.depth_steps]

    def add(self, batch: Answers, identical: int | None) -> None:
        tokens, answers = batch.tokens, len(batch.token_ids) - len(batch.failed)
        self.answers += answers
        self.tokens += tokens
        self.seconds += batch.seconds
        self.rates.append(tokens / batch.seconds if batch.seconds else None)
        self.step_tokens += tokens - answers if batch.step_tokens is None else batch.step_tokens
        self.identical = None if identical is None else (self.identical or 0) + identical
        if batch.decoding is not None:
            self.decoding_tokens += batch.decoding.tokens
            self.decoding_seconds += batch.decoding.seconds
        for stats in batch.stats:
            self._add_steps(stats)

    def _add_steps(self, stats: Any) -> None:
        self.num_steps += stats.num_steps
        for index, share in enumerate(stats.acceptance_by_depth):
            while len(self.depth_steps) <= index:
                self.depth_steps.append(0.0)
            self.depth_steps[index] += share * stats.num_steps

    def against(self, other: "Tally") -> dict[str, Any]:
        """For JSON: everything, ratios to `other` included."""
        return {
            **asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "ratio": _ratio(self, other),
            "median_ratio": _median_ratio(self, other),
            "decoding_tokens_per_second": self.decoding_tokens_per_second,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_depth": self.acceptance_by_depth,
        }


@dataclass
class MethodResult:
    """One method over all prompts, and by category where prompts have one."""

    name: str
    total: Tally = field(default_factory=Tally)
    categories: dict[str, Tally] = field(default_factory=dict)
    not_run: str | None = None  # why there are no figures
    drafter_notes: list[str] = field(default_factory=list)  # of the last prompt
    ours: bool = False
    lossy: bool = False
    activations: str = FLOAT32
    identical_to: str = ""  # the method that answers were compared with


@dataclass
class BenchReport:
    """Results in the order of the methods; ratios are to the first.

    `identical_to`: the method that ours were compared with. `agreement`: of `agreeing` with the
    first method, where that is in float32 and ours is not; None: not measured.
    """

    results: list[MethodResult]
    num_prompts: int
    max_new_tokens: int
    batch_size: int = 1
    identical_to: str = ""
    agreement: Agreement | None = None
    agreeing: str = ""

    @property
    def ran(self) -> list[MethodResult]:
        return [result for result in self.results if result.not_run is None]

    @property
    def categories(self) -> list[str]:
        return list(self.results[0].categories)

    def ratio(self, result: MethodResult) -> float:
        return _ratio(result.total, self.results[0].total)

    def median_ratio(self, result: MethodResult) -> float:
        return _median_ratio(result.total, self.results[0].total)

    def category_ratio(self, result: MethodResult, category: str) -> float:
        first = self.results[0].categories[category]
        return _ratio(result.categories[category], first)

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "identical_to": self.identical_to,
            "agreement_with_float32": None if self.agreement is None else self.agreement.as_dict(),
            "methods": [self._record(result) for result in self.results],
        }

    def _record(self, result: MethodResult) -> dict[str, Any]:
        if result.not_run is not None:
            return {"name": result.name, "not_run": result.not_run}
        first = self.results[0]
        by_category = {
            name: tally.against(first.categories[name]) for name, tally in result.categories.items()
        }
        return {
            "name": result.name,
            "lossy": result.lossy,
            "activations": result.activations,
            "identical_to": result.identical_to,
            **result.total.against(first.total),
            "drafter_notes": result.drafter_notes,
            **({"categories": by_category} if by_category else {}),
        }


def bench(
    methods: Sequence[Method],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    batch_size: int = 1,
    categories: Sequence[str | None] | None = None,
    sampled: bool = False,
    enough: Callable[[], bool] | None = None,
) -> BenchReport:
    """Run every batch of prompts (token ids) through every method; ratios are to the first.

    A batch has prompts of one category. Answers are compared with the first method's; `sampled`
    ones with those of our first method, since other methods draw other numbers, and those in
    another precision with our first in the same. A method that fails is left out with its reason,
    unless it is the first or ours. `enough`: asked after each batch;
    the report is of the batches so far.
    """
    batches = _batches(prompts, categories or [None] * len(prompts), batch_size)
    references = [_reference(methods, method, sampled) for method in methods]
    results = [
        MethodResult(method.name, ours=method.ours, lossy=method.lossy,
                     activations=method.activations, identical_to=methods[reference].name)
        for method, reference in zip(methods, references, strict=True)
    ]  # fmt: skip
    agreeing = _agreeing(methods, sampled)
    agreement = None if agreeing is None else Agreement()
    for batch in _one_of_each_size([batch for _, batch in batches]):
        for method, result in zip(methods, results, strict=True):
            if not method.warm:
                _attempt(method, result, batch, method is methods[0])
    measured = 0
    with console.progress("benchmarking", len(prompts), "prompts") as bar:
        for index, (category, batch) in enumerate(batches):
            answers = _round(methods, results, batch, index)
            for which, answer in answers.items():
                comparable = _comparable(methods[which], sampled)
                same = _identical(answer, answers[references[which]]) if comparable else None
                results[which].total.add(answer, same)
                results[which].drafter_notes = answer.notes
                if category is not None:
                    results[which].categories.setdefault(category, Tally()).add(answer, same)
            if agreement is not None and agreeing is not None:
                agreement.compare(answers[agreeing].token_ids, answers[0].token_ids)
            best = max((results[which].total for which in answers), key=_speed)
            bar.advance(len(batch), note=f"best {_ratio(best, results[0].total):.2f} ×")
            measured += len(batch)
            if enough is not None and enough():
                break
    _leave_out_failed(results)
    of_ours = references[_first_of_ours(methods) or 0]
    return BenchReport(
        results, measured, max_new_tokens, batch_size, methods[of_ours].name, agreement,
        "" if agreeing is None else methods[agreeing].name,
    )  # fmt: skip


def _first_of_ours(methods: Sequence[Method], activations: str | None = None) -> int | None:
    """The index of our first method with exact answers, in this precision if one is given."""
    found = (
        index
        for index, method in enumerate(methods)
        if method.ours and not method.lossy and activations in (None, method.activations)
    )
    return next(found, None)


def _reference(methods: Sequence[Method], method: Method, sampled: bool) -> int:
    """The index of the method whose answers this one's must equal."""
    if not sampled and method.activations == methods[0].activations:
        return 0
    return _first_of_ours(methods, method.activations) or 0


def _agreeing(methods: Sequence[Method], sampled: bool) -> int | None:
    """The index of the method whose agreement with float32 is counted: our first, where it is
    rounded and the first method answers in float32."""
    first, ours = methods[0], _first_of_ours(methods)
    in_float32 = first.activations == FLOAT32 and _comparable(first, sampled)
    return ours if ours and in_float32 and methods[ours].activations != FLOAT32 else None


def _comparable(method: Method, sampled: bool) -> bool:
    return method.has_ids and not method.lossy and (method.ours or not sampled)


def _batches(
    prompts: Sequence[list[int]], categories: Sequence[str | None], size: int
) -> list[tuple[str | None, Batch]]:
    """Batches of one category each, in the order in which categories appear."""
    if not prompts:
        raise DataError("there is no prompt to measure with", hint="give a file with prompts")
    any_named = any(category is not None for category in categories)
    groups: dict[str | None, Batch] = {}
    for prompt, category in zip(prompts, categories, strict=True):
        label = (category or UNCATEGORISED) if any_named else None
        groups.setdefault(label, []).append(list(prompt))
    return [
        (category, group[start : start + size])
        for category, group in groups.items()
        for start in range(0, len(group), size)
    ]


def _one_of_each_size(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Batches to warm up with (kernels, packed weights, caches), the longest first."""
    seen = set[int]()
    for batch in sorted(batches, key=lambda batch: max(map(len, batch)), reverse=True):
        if len(batch) not in seen:
            seen.add(len(batch))
            yield batch


def _round(
    methods: Sequence[Method], results: Sequence[MethodResult], batch: Batch, index: int
) -> dict[int, Answers]:
    """Run the batch through every method that still runs; the first rotates with `index`."""
    answers = {}
    running = [i for i, result in enumerate(results) if result.not_run is None]
    for turn in range(len(running)):
        which = running[(index + turn) % len(running)]
        answer = _attempt(methods[which], results[which], batch, which == 0)
        if answer is not None:
            answers[which] = answer
    return answers


def _attempt(method: Method, result: MethodResult, batch: Batch, needed: bool) -> Answers | None:
    if result.not_run is not None:
        return None
    try:
        return method.run([list(prompt) for prompt in batch])
    except Exception as error:  # third-party code may raise anything
        if needed or method.ours:
            raise
        result.not_run = _reason(error)
        console.note(f"{method.name} is left out: {result.not_run}")
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, MedusaKitError):
        return error.message
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _leave_out_failed(results: Sequence[MethodResult]) -> None:
    """Leave out methods without any answer. Raises MedusaKitError if the first is one."""
    for result in results:
        if result.not_run is None and not result.total.answers:
            result.not_run = "; ".join(result.drafter_notes) or "no prompt was answered"
    if results[0].not_run is not None:
        raise MedusaKitError(f"{results[0].name}: {results[0].not_run}")


def _identical(answers: Answers, reference: Answers) -> int:
    pairs = zip(answers.token_ids, reference.token_ids, strict=True)
    return sum(
        ours == theirs for at, (ours, theirs) in enumerate(pairs) if at not in answers.failed
    )


def _speed(tally: Tally) -> float:
    return tally.tokens_per_second


def _ratio(tally: Tally, other: Tally) -> float:
    """0 where one of them has no answers, such as in a category."""
    return _speed(tally) / _speed(other) if other.seconds else 0.0


def _median_ratio(tally: Tally, other: Tally) -> float:
    """The median over batches that both answered; 0 without any."""
    pairs = zip(tally.rates, other.rates, strict=True)
    ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
    return statistics.median(ratios) if ratios else 0.0
