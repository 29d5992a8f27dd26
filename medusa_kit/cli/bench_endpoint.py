"""The options of `medusa-kit bench` about a running server, and what they become."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.cli import bench_report, options
from medusa_kit.errors import UsageError

PARAMETER = "server"  # the parameter that these options replace
ROUND = 8  # prompts in a round, times the requests at once, where a server is measured alone
# Options that mean something to a bench that loads no model.
USED_ALONE = frozenset({"endpoint", "endpoint_model", "endpoint_only", "concurrency", "api_key_env",
                        "arrivals", "rate", "model", "prompts", "limit", "max_new_tokens",
                        "temperature", "seed", "output"})  # fmt: skip
# Options about methods that decode here, of which there are none under load.
OF_METHODS = frozenset({"heads", "drafters", "drafter", "drafter_options", "draft_model",
                        "fallback", "tree", "guesses", "peers", "assistant", "breakdown",
                        "batch_size"})  # fmt: skip
NO_DRAFTS: Mapping[str, Any] = {
    "heads": None, "tree": None, "drafter": "none", "drafter_options": {}, "draft_model": None,
    "fallback": None,
}  # fmt: skip
CLOSED, POISSON = "closed", "poisson"


def _options(
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure a running OpenAI-compatible server too: its address up to /v1, see "
            "docs/serving_benchmarks.md.",
        ),
    ] = None,
    endpoint_model: options.EndpointModel = None,
    endpoint_only: Annotated[
        bool, typer.Option("--endpoint-only", help="Measure the server alone; no model is loaded.")
    ] = False,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N…]",
            help="Requests to the server at once; several by commas are a sweep; default: 1.",
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Measure under load: closed (--concurrency clients take turns) or poisson "
            "(requests arrive at random, --rate a second); default for a sweep: closed."
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="R[,R…]", help="Requests a second that arrive, with poisson."),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with the server's API key; default: OPENAI_API_KEY.",
        ),
    ] = None,
) -> None:
    """The options themselves; a command gets them as a `Server`."""


@dataclass(frozen=True)
class Server:
    """The options about the server, as given."""

    endpoint: str
    endpoint_model: str | None
    endpoint_only: bool
    concurrency: str | None
    arrivals: str | None
    rate: str | None
    api_key_env: str | None

    @property
    def at_once(self) -> list[int]:
        """Numbers of requests at once. Raises UsageError for anything but numbers of at least 1."""
        return _numbers("--concurrency", self.concurrency or "1", int)

    @property
    def under_load(self) -> bool:
        return self.arrivals is not None or len(self.at_once) > 1

    def loads(self, seed: int) -> list[Any]:
        """The loads to measure under, one after another; none where the server is one method of a
        bench. Raises UsageError."""
        if not self.under_load:
            return []
        from medusa_kit.bench.load.arrivals import Closed, Poisson

        if self.arrivals != POISSON:
            return [Closed(number) for number in self.at_once]
        rates = _numbers("--rate", self.rate or "", float)
        return [Poisson(rate, seed) for rate in rates]

    def check(self, given: Collection[str], batch_size: int) -> None:
        """Raises UsageError for options that would have no effect."""
        _check_arrivals(self)
        if self.endpoint_only:
            if unused := sorted(set(given) - USED_ALONE):
                raise UsageError(
                    f"with --endpoint-only nothing is decoded here: {_flags(unused)} would not be "
                    "used",
                    hint="leave it out, or leave out --endpoint-only",
                )
        elif self.under_load:
            if unused := sorted(set(given) & OF_METHODS):
                raise UsageError(
                    f"under load the base alone decodes here, plainly: {_flags(unused)} would not "
                    "be used",
                    hint="leave it out, or give one --concurrency and no --arrivals",
                )
        elif self.at_once[0] > batch_size:
            raise UsageError(
                f"--concurrency {self.concurrency} is more than the {batch_size} prompts of a "
                "round",
                hint=f"--batch-size {self.concurrency} (ours decode as many together), or "
                "--endpoint-only",
            )

    def open(self, model: str, max_new_tokens: int, sampling: Any) -> "Served":
        """Ask for a first answer. Raises ConfigError, DataError or MedusaKitError without one."""
        from medusa_kit.distill.openai_client import Endpoint
        from medusa_kit.distill.openai_stream import probe

        key, name = self.api_key_env or "OPENAI_API_KEY", self.endpoint_model or model
        # Text encoded again may be other tokens; under load they tell what a piece holds.
        ids = self.under_load or not self.endpoint_only
        endpoint, usage = probe(
            Endpoint(self.endpoint, name, key, max_new_tokens, sampling, return_token_ids=ids)
        )
        loads = self.loads(sampling.seed)
        return Served(endpoint, usage, self.at_once[0], self.endpoint_only, model, loads)


def _numbers(flag: str, text: str, kind: type) -> list[Any]:
    try:
        values = [kind(value) for value in text.split(",")]
    except ValueError:
        values = []
    minimum = 1 if kind is int else 0
    in_range = all(minimum <= value < float("inf") and value != 0 for value in values)
    if not values or not in_range:
        expected = "whole numbers of at least 1" if kind is int else "numbers above 0"
        raise UsageError(f"{flag} {text!r}: expected {expected}, by commas")
    return list(dict.fromkeys(values))


def _flags(names: Sequence[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _check_arrivals(server: Server) -> None:
    if server.arrivals not in (None, CLOSED, POISSON):
        raise UsageError(f"--arrivals {server.arrivals!r}: expected {CLOSED} or {POISSON}")
    if server.arrivals == POISSON:
        if server.rate is None:
            raise UsageError("arrivals by chance need a rate", hint="--rate 2, a second")
        if server.concurrency is not None:
            raise UsageError(
                "with --arrivals poisson requests start when they arrive, and --concurrency would "
                "not be used",
                hint="leave it out, or --arrivals closed",
            )
    elif server.rate is not None:
        raise UsageError("--rate would not be used", hint="it goes with --arrivals poisson")
    server.loads(0)


@dataclass
class Served:
    """A server that answers."""

    endpoint: Any
    include_usage: bool
    concurrency: int
    alone: bool
    model: str  # its tokenizer counts where the server sends no usage
    loads: list[Any] = field(default_factory=list)  # none: a method of the bench
    runs: list[Any] = field(default_factory=list)

    def beside(self, prompt_set: Sequence[Any], ids: Sequence[list[int]], tokenizer: Any) -> Any:
        """The server as a method among those that decode `ids` here."""
        keys = [tuple(row) for row in ids]
        return self._method(prompt_set, keys, lambda: tokenizer, compare=True)

    @property
    def apart(self) -> bool:
        """Whether it is not a method among others."""
        return self.alone or bool(self.loads)

    def measure_apart(
        self,
        prompt_set: Sequence[Any],
        prompts: str,
        output: Path | None,
        loading: Mapping[str, Any],
    ) -> None:
        if self.loads:
            self._measure_under_load(prompt_set, prompts, output, loading)
        else:
            self._measure_alone(prompt_set, prompts, output)

    def _measure_alone(self, prompt_set: Sequence[Any], prompts: str, output: Path | None) -> None:
        """Measure the server as the only method. Where several requests run at once, rounds are
        large, so that little time is spent on waiting for the last request, and mix all categories.
        """
        from medusa_kit.base.loading import load_tokenizer
        from medusa_kit.bench.about import About
        from medusa_kit.bench.bench import bench

        keys = [(number,) for number in range(len(prompt_set))]  # prompts have no ids here
        method = self._method(prompt_set, keys, functools.cache(lambda: load_tokenizer(self.model)),
                              compare=False)  # fmt: skip
        sampling = self.endpoint.sampling
        report = bench(
            [method], [list(key) for key in keys], self.endpoint.max_new_tokens,
            batch_size=1 if self.concurrency == 1 else ROUND * self.concurrency,
            categories=None if self.concurrency > 1 else [category for _, category in prompt_set],
            sampled=not sampling.greedy,
        )  # fmt: skip
        report.batch_size = self.concurrency  # requests that ran together; rounds only group them
        where = "a server, timed from outside; nothing was loaded here"
        report.about = About.of(prompts, sampling, endpoint=self.record())
        bench_report.show(report, {}, self.endpoint.url, where)
        if output is not None:
            report.write(self.endpoint.model, output)

    def _measure_under_load(
        self,
        prompt_set: Sequence[Any],
        prompts: str,
        output: Path | None,
        loading: Mapping[str, Any],
    ) -> None:
        """Measure one load after another. Answers are compared with the base's own, decoded here
        first, unless the server is measured alone or tokens are drawn by chance."""
        from medusa_kit.base.loading import load_tokenizer
        from medusa_kit.bench.about import About
        from medusa_kit.bench.endpoint import Question
        from medusa_kit.bench.load import report
        from medusa_kit.bench.load.run import LoadRun, PlainAnswers

        questions = [Question(number, messages)
                     for number, (messages, _) in enumerate(prompt_set, start=1)]  # fmt: skip
        sampling, plain = self.endpoint.sampling, None
        if not self.alone and sampling.greedy:
            from medusa_kit.engine.load import load

            engine = load(**{**loading, **NO_DRAFTS})
            plain = PlainAnswers.by(engine, questions, self.endpoint.max_new_tokens)
        run = LoadRun(self.endpoint, questions, functools.cache(lambda: load_tokenizer(self.model)),
                      self.include_usage, plain)  # fmt: skip
        for number, arrivals in enumerate(self.loads, start=1):
            console.note(f"load {number} of {len(self.loads)}: {report.described(arrivals)}")
            run.measure(arrivals)
        about = About.of(prompts, sampling)
        report.show(run, about.sampled)
        if output is not None:
            report.write(run, about.to_json(), output)

    def _method(
        self, prompt_set: Sequence[Any], keys: Sequence[Any], tokenizer: Any, compare: bool
    ) -> Any:
        from medusa_kit.bench.endpoint import EndpointRun, Question

        prompts = {
            key: Question(number, messages)
            for number, (key, (messages, _)) in enumerate(
                zip(keys, prompt_set, strict=True), start=1
            )
        }
        self.runs.append(EndpointRun(self.endpoint, prompts, tokenizer, self.concurrency,
                                     self.include_usage, compare))  # fmt: skip
        return self.runs[-1].method()

    def record(self) -> dict[str, Any]:
        """The record of the server in bench.json."""
        return dict(self.runs[-1].record())


def with_server(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `server` by the options."""
    option_parameters = list(inspect.signature(_options).parameters.values())

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        values = {parameter.name: arguments.pop(parameter.name) for parameter in option_parameters}
        if values["endpoint"] is None:
            if unused := [name for name, value in values.items() if value]:
                raise UsageError(f"without a server {_flags(unused)} would not be used",
                                 hint="name it: --endpoint URL")  # fmt: skip
            command(**arguments)
        else:
            command(**arguments, **{PARAMETER: Server(**values)})

    parameters = options.parameters_with(command, PARAMETER, option_parameters)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
