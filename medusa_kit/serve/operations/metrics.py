"""What the server counts, for Prometheus, in a registry of its own.

Requests are counted by a middleware; how the batch stands is read when somebody asks; an
AnswerClock times one answer.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.infer.decode.batches import BatchStats
from medusa_kit.serve.operations.acceptance import STEPS, ServedAcceptance

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SECONDS_OF_A_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
DEEPEST = 16  # deeper tokens are counted with these, so that labels stay few
GAUGES = {
    "running": "answers that are decoded",
    "reading": "prompts that are being read",
    "waiting": "requests without a place in the batch",
    "nodes": "nodes of the batch's last step",
    "held_prefixes": "places that keep the text of an earlier answer",
    "cached_tokens": "tokens of those",
}


class Metrics:
    """Counters of one server. Every method may be called in any thread."""

    def __init__(
        self,
        stats: Callable[[], BatchStats] | None = None,
        heads: HeadsStore | None = None,
        acceptance: ServedAcceptance | None = None,
    ) -> None:
        registry = self.registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "medusa_kit_requests", "requests by route and status", ["route", "status"],
            registry=registry,
        )  # fmt: skip
        self.refusals = Counter(
            "medusa_kit_queue_refusals", "requests refused since the queue was full",
            registry=registry,
        )  # fmt: skip
        self.tokens = Counter("medusa_kit_tokens", "tokens of answers", registry=registry)
        self.accepted = Counter(
            "medusa_kit_accepted_tokens",
            "tokens of answers by the depth in the tree at which they were accepted; 0: the base "
            "model's own",
            ["depth"],
            registry=registry,
        )
        labels = ["drafter", "heads"]
        self.answers = Counter(
            "medusa_kit_answers", "answers by drafter, and by the heads that requests named",
            labels, registry=registry,
        )  # fmt: skip
        self.answer_steps = Counter(
            "medusa_kit_answer_steps", "steps of these answers", labels, registry=registry
        )
        self.answer_tokens = Counter(
            "medusa_kit_answer_tokens",
            "tokens of these answers; less one for each answer and divided by the steps, the "
            "acceptance length",
            labels,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "medusa_kit_prompt_tokens", "tokens of prompts", registry=registry
        )
        self.cached_tokens = Counter(
            "medusa_kit_cached_tokens", "tokens of prompts that were not read again",
            registry=registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "medusa_kit_time_to_first_token_seconds", "from the request to its first token",
            registry=registry, buckets=SECONDS,
        )  # fmt: skip
        self.between_tokens = Histogram(
            "medusa_kit_time_between_tokens_seconds",
            "the time between two steps of an answer, divided by the tokens of the later one",
            registry=registry,
            buckets=SECONDS_OF_A_TOKEN,
        )
        if acceptance is not None:
            registry.register(_AcceptanceCollector(acceptance))
        if stats is not None:
            registry.register(_BatchCollector(stats))
        if heads is not None:
            registry.register(_HeadsCollector(heads))

    def answer(self, start: float) -> "AnswerClock":
        """`start`: by time.monotonic, asyncio's clock too, when the request arrived."""
        return AnswerClock(self, start)

    def page(self) -> bytes:
        return generate_latest(self.registry)


class AnswerClock:
    """Times one answer. The batch's thread calls `stamp`, which costs it next to nothing, and
    others the rest."""

    def __init__(
        self, metrics: Metrics, start: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics, self._clock = metrics, clock
        self._last, self._any = start, False
        self._stamps: deque[tuple[float, int]] = deque()

    def stamp(self, num_tokens: int) -> None:
        """A step emitted so many tokens now."""
        if num_tokens:
            self._stamps.append((self._clock(), num_tokens))

    def settle(self) -> None:
        """Count the steps so far."""
        metrics = self._metrics
        while (stamp := self._next()) is not None:
            now, num_tokens = stamp
            passed, self._last = now - self._last, now
            metrics.tokens.inc(num_tokens)
            if self._any:
                for _ in range(num_tokens):
                    metrics.between_tokens.observe(passed / num_tokens)
            else:
                metrics.first_token.observe(passed)
                self._any = True

    def _next(self) -> tuple[float, int] | None:
        try:
            return self._stamps.popleft()
        except IndexError:
            return None

    def accepted(self, num_tokens: int, num_guessed: int) -> None:
        """The first `num_guessed` tokens of a step were accepted draft tokens. Where the answer
        ended within them it has fewer tokens."""
        counter, guessed = self._metrics.accepted, min(num_guessed, num_tokens)
        for depth in range(1, guessed + 1):
            counter.labels(str(min(depth, DEEPEST))).inc()
        if num_tokens > guessed:
            counter.labels("0").inc(num_tokens - guessed)

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """The prompt's length, and how much of it was there already."""
        self._metrics.prompt_tokens.inc(num_tokens)
        self._metrics.cached_tokens.inc(num_cached)

    def end(self, drafter: str, heads: str | None, num_tokens: int, num_steps: int) -> None:
        """The answer has ended. `heads`: that its request named."""
        metrics = self._metrics
        metrics.answers.labels(drafter, heads or "").inc()
        metrics.answer_steps.labels(drafter, heads or "").inc(num_steps)
        metrics.answer_tokens.labels(drafter, heads or "").inc(num_tokens)


class _AcceptanceCollector(Collector):
    """Collects how served text is drafted beside what was measured."""

    def __init__(self, acceptance: ServedAcceptance) -> None:
        self._acceptance = acceptance

    def collect(self) -> Iterable[GaugeMetricFamily]:
        acceptance = self._acceptance
        if acceptance.measured is not None:
            description = "acceptance length of the heads when their tree was searched"
            name = "medusa_kit_measured_acceptance_length"
            yield GaugeMetricFamily(name, description, value=acceptance.measured)
        if acceptance.share is not None:
            description = (
                f"the heads' accepted draft tokens in the last {STEPS} steps that they drafted, "
                "divided by those of as large trees in that search"
            )
            name = "medusa_kit_share_of_measured_acceptance"
            yield GaugeMetricFamily(name, description, value=acceptance.share)
        description = f"1: no draft token of this drafter was accepted in {STEPS} steps or more"
        family = GaugeMetricFamily("medusa_kit_never_accepted", description, labels=["drafter"])
        for drafter in acceptance.never_accepted:
            family.add_metric([drafter], 1)
        yield family


class _HeadsCollector(Collector):
    """Collects the memory that named heads take."""

    def __init__(self, heads: HeadsStore) -> None:
        self._heads = heads

    def collect(self) -> Iterable[GaugeMetricFamily]:
        description = "of memory that heads named by requests take"
        yield GaugeMetricFamily("medusa_kit_heads_bytes", description, value=self._heads.num_bytes)
        yield GaugeMetricFamily(
            "medusa_kit_heads_loaded", "named heads in memory", value=self._heads.num_loaded
        )


class _BatchCollector(Collector):
    """Collects the numbers of requests and slots in the batch."""

    def __init__(self, stats: Callable[[], BatchStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._stats()
        for name, description in GAUGES.items():
            yield GaugeMetricFamily(
                f"medusa_kit_batch_{name}", description, value=getattr(stats, name)
            )
        yield CounterMetricFamily("medusa_kit_batch_steps", "forwards so far", value=stats.steps)


class MetricsMiddleware:
    """Counts requests by route and status. Routes, not paths: clients can make up any number of
    those."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = 0  # the client went before it was answered

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except BaseException:
            status = status or 500
            raise
        finally:
            self._count(route_of(scope), status)

    def _count(self, route: str, status: int) -> None:
        self.metrics.requests.labels(route, "none" if not status else str(status)).inc()
        if status == 429:
            self.metrics.refusals.inc()


def route_of(scope: Scope) -> str:
    """The route that took the request, as the app's author wrote it."""
    route = scope.get("route")
    return str(getattr(route, "path", None) or "other")
