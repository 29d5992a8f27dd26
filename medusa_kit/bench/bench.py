"""Bench: compares decoding methods (methods.py), interleaved on the same prompts.

Timings jitter, so every batch of prompts goes through every method in turn, in rotating order, and
ratios within one run are what counts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from medusa_kit import console
from medusa_kit.bench.agreement import Agreement
from medusa_kit.bench.report import Answers, BenchReport, MethodResult, Named, Tally
from medusa_kit.bench.time_needed import say_how_long
from medusa_kit.errors import DataError, MedusaKitError
from medusa_kit.loops import loop_start
from medusa_kit.settings.engine import FLOAT32

Batch = list[list[int]]  # token ids of each prompt
UNCATEGORISED = "(none)"


@dataclass
class Method(Named):
    """A way to decode. `warm`: needs no warm-up round. `has_ids`: answers come with token ids,
    which can be compared; those in another precision than the first method's with the kit's first
    in the same."""

    run: Callable[[Batch], Answers]
    warm: bool = False
    has_ids: bool = True


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
        MethodResult(method.name, kind=method.kind, drafter=method.drafter, lossy=method.lossy,
                     activations=method.activations, identical_to=methods[reference].name)
        for method, reference in zip(methods, references, strict=True)
    ]  # fmt: skip
    agreeing = _agreeing(methods, sampled)
    agreement = None if agreeing is None else Agreement()
    seconds = _warm_up(methods, results, [batch for _, batch in batches])
    if enough is None:
        say_how_long(seconds * len(batches), "as long as the first round each")
    measured, loops = 0, Loops(results)
    with console.progress("benchmarking", len(prompts), "prompts") as bar:
        for index, (category, batch) in enumerate(batches):
            answers = _round(methods, results, batch, index)
            timed = not loops.keep(category, answers)
            for which, answer in answers.items():
                comparable = _comparable(methods[which], sampled)
                same = _identical(answer, answers[references[which]]) if comparable else None
                results[which].total.add(answer, same, timed)
                results[which].drafter_notes = answer.notes
                if category is not None:
                    results[which].categories.setdefault(category, Tally()).add(answer, same, timed)
            if agreement is not None and agreeing is not None:
                agreement.compare(answers[agreeing].token_ids, answers[0].token_ids)
            bar.advance(len(batch), note=_best(results))
            measured += len(batch)
            if enough is not None and enough():
                break
    _leave_out_failed(results)
    loops.count_where_alone()
    return BenchReport(
        results, measured, max_new_tokens, batch_size,
        results[_first_kit_method(methods) or 0].identical_to, agreement, loops.prompts,
        loops.left_out,
    )  # fmt: skip


def _warm_up(
    methods: Sequence[Method], results: Sequence[MethodResult], batches: Sequence[Batch]
) -> float:
    """Run a batch of each size through every method that needs it; returns the longest seconds."""
    cold, longest = [method.name for method in methods if not method.warm], 0.0
    if cold:
        console.note(f"a first round, which is not measured: {', '.join(cold)}")
    for batch in _one_of_each_size(batches):
        began = time.monotonic()
        for method, result in zip(methods, results, strict=True):
            if not method.warm:
                _attempt(method, result, batch, method is methods[0])
        longest = max(longest, time.monotonic() - began)
    return longest


def _best(results: Sequence[MethodResult]) -> str:
    """The best of the methods so far, for the line of progress."""
    ratios = [result.total.ratio(results[0].total) for result in results]
    known = [ratio for ratio in ratios if ratio is not None]
    return f"best {max(known):.2f} × {results[0].name}" if known else "only loops so far"


class Loops:
    """Batches with an answer that ends in a loop, which drafting copies for nothing. A batch is
    timed as a whole, so its other prompts are `left_out` too."""

    def __init__(self, results: Sequence[MethodResult]) -> None:
        self.prompts, self.left_out, self._results = 0, 0, results
        self._kept: list[tuple[str | None, dict[int, Answers]]] = []

    def keep(self, category: str | None, answers: dict[int, Answers]) -> bool:
        """Whether this batch is one of them, by any method's answers."""
        found = {place for one in answers.values() for place, ids in enumerate(one.token_ids)
                 if loop_start(ids) is not None}  # fmt: skip
        if found:
            self.prompts += len(found)
            self.left_out += max(len(one.token_ids) for one in answers.values())
            self._kept.append((category, answers))
        return bool(found)

    def count_where_alone(self) -> None:
        """Time them where nothing else was timed, in all or in a category."""
        total = self._results[0].total
        alone = {category for category, tally in self._results[0].categories.items()
                 if not tally.seconds}  # fmt: skip
        nothing = not total.seconds
        for category, answers in self._kept:
            for which, answer in answers.items():
                if nothing:
                    self._results[which].total.add_times(answer)
                if category in alone:
                    self._results[which].categories[category].add_times(answer)


def _first_kit_method(methods: Sequence[Method], activations: str | None = None) -> int | None:
    """The index of the kit's first method with exact answers, in this precision if one is given."""
    indices = (
        index
        for index, method in enumerate(methods)
        if method.ours and not method.lossy and activations in (None, method.activations)
    )
    return next(indices, None)


def _reference(methods: Sequence[Method], method: Method, sampled: bool) -> int:
    """The index of the method whose answers this one's must equal."""
    if not sampled and method.activations == methods[0].activations:
        return 0
    return _first_kit_method(methods, method.activations) or 0


def _agreeing(methods: Sequence[Method], sampled: bool) -> int | None:
    """The index of the method whose agreement with float32 is counted: the kit's first, where it is
    rounded and the first method of all answers in float32."""
    first, kit_method = methods[0], _first_kit_method(methods)
    in_float32 = first.activations == FLOAT32 and _comparable(first, sampled)
    if kit_method and in_float32 and methods[kit_method].activations != FLOAT32:
        return kit_method
    return None


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
    answered = (pair for index, pair in enumerate(pairs) if index not in answers.failed)
    return sum(actual == expected for actual, expected in answered)
