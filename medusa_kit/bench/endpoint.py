"""A running OpenAI-compatible server as a method of the bench, streamed and timed by the client.

Only the time in which a request was in progress counts, not waits before a retry nor failed
requests. Decoding is the time after a request's first token, counted the same way.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from medusa_kit.bench.bench import Batch, Method
from medusa_kit.bench.report import Answers, Decoding
from medusa_kit.bench.served_acceptance import (
    Counts,
    ServedSteps,
    fetch_counts,
    restarted,
    steps_between,
)
from medusa_kit.data.readers import Message
from medusa_kit.distill.openai_client import Endpoint, encode_again, with_end
from medusa_kit.distill.openai_stream import Streamed, stream_answer
from medusa_kit.errors import MedusaKitError

HOPELESS_FAILURES = 5  # in a row: then the prompts are not the cause
FAILURES_SAID = 5


@dataclass(frozen=True)
class Question:
    """A prompt as it is sent to the server; `number` from 1, as in the prompt file."""

    number: int
    messages: list[Message]


@dataclass
class EndpointRun:
    """A server and its results so far.

    `prompts`: by their token ids in the bench. `tokenizer` returns the tokenizer with which answers
    are encoded again: with `compare` those without token ids, else those without usage.
    """

    endpoint: Endpoint
    prompts: Mapping[tuple[int, ...], Question]
    tokenizer: Callable[[], Any]
    concurrency: int = 1
    include_usage: bool = True
    compare: bool = True
    answers: list[Streamed] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens of each answer
    failed: dict[int, str] = field(default_factory=dict)  # prompt number -> reason
    read_otherwise: list[tuple[int, int, int]] = field(default_factory=list)  # number, theirs, ours
    steps: list[ServedSteps] = field(default_factory=list)
    has_metrics: bool = True
    rounds: int = 0
    rounds_lost: int = 0  # rounds in which its counters could not be read
    _failures_in_a_row: int = 0

    @property
    def name(self) -> str:
        return f"endpoint, {self.endpoint.model}"

    def method(self) -> Method:
        return Method(self.name, self.run, kind="endpoint", warm=True, has_ids=self.compare)

    def run(self, batch: Batch) -> Answers:
        """Raises MedusaKitError after HOPELESS_FAILURES failures in a row."""
        before = fetch_counts(self.endpoint) if self.has_metrics else None
        self.has_metrics = before is not None or (self.has_metrics and self.rounds > 0)
        with ThreadPoolExecutor(self.concurrency) as pool:
            got = list(pool.map(self._fetch, [self.prompts[tuple(ids)] for ids in batch]))
        steps = self._steps_since(before)
        ids = [self._encode(answer) if self.compare else [] for answer in got]
        counts = [self._count(answer, again) for answer, again in zip(got, ids, strict=True)]
        self._note(batch, got, counts)
        answers = [answer for answer in got if isinstance(answer, Streamed)]
        return Answers(
            ids,
            _covered([(answer.started, answer.ended) for answer in answers]),
            [] if steps is None else [steps],
            _decoding(answers, sum(counts)),
            counts=counts,
            step_tokens=0 if steps is None else steps.tokens,
            failed=[index for index, answer in enumerate(got) if not isinstance(answer, Streamed)],
            method_notes=self.notes(),
        )

    def _steps_since(self, before: Counts | None) -> ServedSteps | None:
        after = fetch_counts(self.endpoint) if before is not None else None
        self.rounds += 1
        if before is None or after is None or restarted(before, after):
            self.rounds_lost += self.has_metrics
            return None
        steps = steps_between(before, after)
        self.steps += [] if steps is None else [steps]
        return steps

    def _fetch(self, question: Question) -> Streamed | MedusaKitError:
        try:
            return stream_answer(self.endpoint, question.messages, include_usage=self.include_usage)
        except MedusaKitError as error:
            return error

    def _encode(self, got: Streamed | MedusaKitError) -> list[int]:
        if not isinstance(got, Streamed):
            return []
        if got.token_ids is not None:
            unsent = got.completion_tokens == len(got.token_ids) + 1
            return with_end(self.tokenizer(), got.token_ids) if unsent else got.token_ids
        return encode_again(self.tokenizer(), got.text, got.finish_reason)

    def _count(self, got: Streamed | MedusaKitError, ids: list[int]) -> int:
        if not isinstance(got, Streamed):
            return 0
        if got.completion_tokens is not None:
            return got.completion_tokens
        return len(ids if self.compare else self._encode(got))

    def _note(
        self, batch: Batch, got: Sequence[Streamed | MedusaKitError], counts: Sequence[int]
    ) -> None:
        for ids, answer, count in zip(batch, got, counts, strict=True):
            number = self.prompts[tuple(ids)].number
            if not isinstance(answer, Streamed):
                # Reports are shared, so they must not contain the address of a private server.
                self.failed[number] = answer.message.replace(self.endpoint.url, "the server")
                self._failures_in_a_row += 1
                if self._failures_in_a_row >= HOPELESS_FAILURES:
                    raise MedusaKitError(self.failed[number], hint=answer.hint)
                continue
            self._failures_in_a_row = 0
            self.answers.append(answer)
            self.counts.append(count)
            if self.compare and answer.prompt_tokens not in (None, len(ids)):
                self.read_otherwise.append((number, answer.prompt_tokens or 0, len(ids)))

    def record(self) -> dict[str, Any]:
        """How the server was measured, and the figures that only servers have, for JSON."""
        firsts = [got.first - got.started for got in self.answers if got.first is not None]
        rates = [
            (count - 1) / (answer.ended - answer.first)
            for answer, count in zip(self.answers, self.counts, strict=True)
            if answer.first is not None and count > 1 and answer.ended > answer.first
        ]
        return {
            "model": self.endpoint.model,
            "concurrency": self.concurrency,
            "answers": len(self.answers),
            "failed": self.failed,
            "tokens_counted_by": self._counted_by(),
            "first_token_seconds": statistics.median(firsts) if firsts else None,
            "request_tokens_per_second": statistics.median(rates) if rates else None,
            "drafted_tokens": sum(steps.draft_tokens for steps in self.steps),
            "accepted_tokens": sum(steps.accepted_tokens for steps in self.steps),
            "rounds": self.rounds,
            "rounds_without_metrics": self.rounds_lost if self.has_metrics else self.rounds,
            "compared_by": self._compared_by(),
            "prompts_read_otherwise": [number for number, _, _ in self.read_otherwise],
        }

    def _counted_by(self) -> str:
        by_usage = sum(answer.completion_tokens is not None for answer in self.answers)
        if by_usage == len(self.answers):
            return "usage"
        return "encoding again" if not by_usage else "usage, encoding again where there is none"

    def _compared_by(self) -> str | None:
        if not self.compare:
            return None
        by_ids = sum(answer.token_ids is not None for answer in self.answers)
        return "token ids" if by_ids == len(self.answers) else "encoding again"

    def notes(self) -> list[str]:
        """What `record` has, in words."""
        known = self.record()
        first, rate = known["first_token_seconds"], known["request_tokens_per_second"]
        notes = [f"requests at once: {self.concurrency}; tokens counted by "
                f"{known['tokens_counted_by']}"]  # fmt: skip
        if first is None:
            notes.append("it sends answers whole: the time to the first token is not known")
        else:
            decoding = "" if rate is None else f", then {rate:.1f} tokens/s a request"
            notes.append(f"first token after {first * 1e3:.0f} ms{decoding} (medians)")
        notes.append(self._acceptance_note(known["drafted_tokens"], known["accepted_tokens"]))
        if known["compared_by"] == "encoding again":
            notes.append("it sends no token ids: text was encoded again to compare it, which may "
                        "give other tokens for the same text")  # fmt: skip
        notes += self._troubles()
        return notes if self.answers else self._troubles()

    def _troubles(self) -> list[str]:
        notes = []
        if self.read_otherwise:
            number, server_tokens, kit_tokens = self.read_otherwise[0]
            notes.append(
                f"{len(self.read_otherwise)} prompts are not those that we decode (prompt {number}:"
                f" {server_tokens} tokens there, {kit_tokens} here): another template or tokenizer"
            )
        for number, why in list(self.failed.items())[:FAILURES_SAID]:
            notes.append(f"prompt {number} failed: {why}")
        if len(self.failed) > FAILURES_SAID:
            notes.append(f"{len(self.failed)} prompts failed in all")
        return notes

    def _acceptance_note(self, drafted: int, accepted: int) -> str:
        if not self.has_metrics:
            return "no vLLM counters at /metrics: its acceptance is not known"
        lost = ""
        if self.rounds_lost:
            lost = (f"; {self.rounds_lost} of {self.rounds} rounds are not included: /metrics was "
                    "missing, or the server restarted")  # fmt: skip
        if not drafted:
            return f"its counters at /metrics say that it drafted nothing{lost}"
        return (
            f"{accepted:,} of {drafted:,} drafted tokens accepted ({accepted / drafted:.0%}), by "
            f"/metrics, which counts the requests of all clients{lost}"
        )


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans (start, end) ran."""
    seconds, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds


def _decoding(answers: Sequence[Streamed], num_tokens: int) -> Decoding | None:
    spans = [(answer.first, answer.ended) for answer in answers if answer.first is not None]
    if not spans or len(spans) < len(answers):
        return None
    return Decoding(max(0, num_tokens - len(answers)), _covered(spans))
