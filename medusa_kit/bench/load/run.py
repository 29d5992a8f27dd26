"""A server measured under one load after another."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from medusa_kit.bench.endpoint import Question
from medusa_kit.bench.load.arrivals import Load
from medusa_kit.bench.load.records import RequestRecord, answered, summary
from medusa_kit.distill.openai_client import Endpoint, encode_again
from medusa_kit.distill.openai_stream import Streamed, stream_answer
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import MedusaKitError
from medusa_kit.settings.engine import FLOAT32


@dataclass
class PlainAnswers:
    """What plain decoding answers, by the number of the prompt."""

    ids: Mapping[int, list[int]]
    texts: Mapping[int, str]
    stops: frozenset[int]
    activations: str = FLOAT32  # the precision

    @classmethod
    def by(
        cls, engine: Engine, questions: Sequence[Question], max_new_tokens: int
    ) -> "PlainAnswers":
        """The answers of an engine: one prompt at a time, greedy, one token a step."""
        results = {
            question.number: engine.generate(
                engine.encode(question.messages), max_new_tokens=max_new_tokens, drafter="none"
            )
            for question in questions
        }
        return cls(
            {number: result.token_ids for number, result in results.items()},
            {number: result.text for number, result in results.items()},
            frozenset(engine.base.stop_token_ids),
            engine.activations,
        )

    def same(self, record: RequestRecord) -> bool:
        """Whether an answer is plain decoding's, by token ids but the stop token, which not every
        server sends; else by the text."""
        if record.token_ids is None:
            return record.text == self.texts[record.number]
        return self._shown(record.token_ids) == self._shown(self.ids[record.number])

    def _shown(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token not in self.stops]


@dataclass
class LoadPoint:
    """One load and what became of its requests."""

    load: Load
    records: list[RequestRecord]

    def as_dict(self) -> dict[str, Any]:
        return {self.load.what: self.load.value, **summary(self.records)}


@dataclass
class LoadRun:
    """A server and the results of its loads so far. `tokenizer` counts where it sends no usage.

    A request that is refused counts as failed and is not sent again: a later attempt would be
    another arrival.
    """

    endpoint: Endpoint
    questions: Sequence[Question]
    tokenizer: Callable[[], Any]
    include_usage: bool = True
    plain: PlainAnswers | None = None
    points: list[LoadPoint] = field(default_factory=list)

    def measure(self, load: Load) -> LoadPoint:
        """Every question once. Raises MedusaKitError where the server has answered nothing yet."""
        endpoint = replace(self.endpoint, retries=0)
        start = time.perf_counter()

        def ask(question: Question, due: float) -> RequestRecord:
            sent = time.perf_counter()
            try:
                got = stream_answer(endpoint, question.messages, include_usage=self.include_usage)
                return answered(question.number, got, self._count(got), due, start)
            except MedusaKitError as error:
                why = error.message.replace(endpoint.url, "the server")  # reports are shared
                ended = time.perf_counter() - start
                return RequestRecord(question.number, due - start, sent - start, ended, error=why)

        point = LoadPoint(load, load.run(self.questions, ask, start))
        for record in point.records:
            if self.plain is not None and record.answered:
                record.same = self.plain.same(record)
        self.points.append(point)
        if not any(record.answered for done in self.points for record in done.records):
            raise MedusaKitError(f"the server answers no request: {point.records[0].error}")
        return point

    def _count(self, got: Streamed) -> int:
        if got.completion_tokens is not None:
            return got.completion_tokens
        if got.token_ids is not None:
            return len(got.token_ids)
        return len(encode_again(self.tokenizer(), got.text, got.finish_reason))

    @property
    def compared_by(self) -> str | None:
        """How answers were compared with plain decoding."""
        if self.plain is None:
            return None
        answers = [record for point in self.points for record in point.records if record.answered]
        by_ids = sum(record.token_ids is not None for record in answers)
        if by_ids == len(answers):
            return "token ids"
        return "text" if not by_ids else "token ids, or text where there are none"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the figures of each load, with every request."""
        points = [
            {**point.as_dict(), "requests_made": [record.as_dict() for record in point.records]}
            for point in self.points
        ]
        return {
            "endpoint": {"model": self.endpoint.model},
            "max_new_tokens": self.endpoint.max_new_tokens,
            "arrivals": self.points[0].load.as_dict(),
            "compared_by": self.compared_by,
            "activations": None if self.plain is None else self.plain.activations,
            "points": points,
        }
