"""The options of `medusa-kit bench` about a running server, and what they become."""

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit.cli import bench_report, options
from medusa_kit.errors import UsageError

PLACE = "server"  # the parameter that these options replace
ROUND = 8  # prompts in a round, times the requests at once, where a server is measured alone
# Options that mean something to a bench that loads no model.
USED_ALONE = frozenset({"endpoint", "endpoint_model", "endpoint_only", "concurrency", "api_key_env",
                        "model", "prompts", "limit", "max_new_tokens", "temperature", "seed",
                        "output"})  # fmt: skip


def _options(
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure a running OpenAI-compatible server too, up to /v1 (docs/vllm.md).",
        ),
    ] = None,
    endpoint_model: options.EndpointModel = None,
    endpoint_only: Annotated[
        bool, typer.Option("--endpoint-only", help="The server alone: no model is loaded.")
    ] = False,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests to the server at once; 1 unless given.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable that holds the server's key; OPENAI_API_KEY unless given.",
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
    concurrency: int | None
    api_key_env: str | None

    def check(self, given: Collection[str], batch_size: int) -> None:
        """Raises UsageError for options that would have no effect."""
        if self.endpoint_only:
            if unused := sorted(set(given) - USED_ALONE):
                named = ", ".join("--" + name.replace("_", "-") for name in unused)
                raise UsageError(
                    f"with --endpoint-only nothing is decoded here: {named} would not be used",
                    hint="leave it out, or leave out --endpoint-only",
                )
        elif (self.concurrency or 1) > batch_size:
            raise UsageError(
                f"concurrency {self.concurrency} cannot be had: rounds have {batch_size} prompts",
                hint=f"--batch-size {self.concurrency} (ours decode as many together), or "
                "--endpoint-only",
            )

    def open(self, model: str, max_new_tokens: int, sampling: Any) -> "Served":
        """Ask for a first answer. Raises ConfigError, DataError or MedusaKitError without one."""
        from medusa_kit.distill.openai_client import Endpoint
        from medusa_kit.distill.openai_stream import probe

        key, name = self.api_key_env or "OPENAI_API_KEY", self.endpoint_model or model
        compared = not self.endpoint_only  # text encoded again may be other tokens
        endpoint, usage = probe(
            Endpoint(self.endpoint, name, key, max_new_tokens, sampling, return_token_ids=compared)
        )
        return Served(endpoint, usage, self.concurrency or 1, self.endpoint_only, model)


@dataclass
class Served:
    """A server that answers."""

    endpoint: Any
    include_usage: bool
    concurrency: int
    alone: bool
    model: str  # its tokenizer counts where the server sends no usage
    runs: list[Any] = field(default_factory=list)

    def beside(self, asked: Sequence[Any], ids: Sequence[list[int]], tokenizer: Any) -> Any:
        """The server as a method among those that decode `ids` here."""
        return self._method(asked, [tuple(one) for one in ids], lambda: tokenizer, compare=True)

    def measure_alone(self, asked: Sequence[Any], prompts: str, output: Path | None) -> None:
        """Where several requests run at once, rounds are large, so that little time is spent on
        waiting for the last request, and mix all categories.
        """
        from medusa_kit.base.model import load_tokenizer
        from medusa_kit.bench.bench import bench
        from medusa_kit.version import __version__

        keys = [(number,) for number in range(len(asked))]  # prompts have no ids here
        method = self._method(asked, keys, functools.cache(lambda: load_tokenizer(self.model)),
                              compare=False)  # fmt: skip
        sampling = self.endpoint.sampling
        report = bench(
            [method], [list(key) for key in keys], self.endpoint.max_new_tokens,
            batch_size=1 if self.concurrency == 1 else ROUND * self.concurrency,
            categories=None if self.concurrency > 1 else [category for _, category in asked],
            sampled=not sampling.greedy,
        )  # fmt: skip
        report.batch_size = self.concurrency  # requests that ran together; rounds only group them
        where = "a server, timed from outside; nothing was loaded here"
        chosen = bench_report.chosen(sampling)
        bench_report.show(report, {}, self.endpoint.url, chosen, where)
        if output is not None:
            drawn = {"temperature": sampling.temperature, "seed": sampling.seed}
            record = {"prompts": prompts, "sampling": drawn, "endpoint": self.record(),
                      "setup": {"medusa_kit": __version__}}  # fmt: skip
            bench_report.write(report, {}, record, self.endpoint.model, output)

    def _method(
        self, asked: Sequence[Any], keys: Sequence[Any], tokenizer: Any, compare: bool
    ) -> Any:
        from medusa_kit.bench.endpoint import Asked, EndpointRun

        prompts = {
            key: Asked(number, messages)
            for number, (key, (messages, _)) in enumerate(zip(keys, asked, strict=True), start=1)
        }
        self.runs.append(EndpointRun(self.endpoint, prompts, tokenizer, self.concurrency,
                                     self.include_usage, compare))  # fmt: skip
        return self.runs[-1].method()

    def record(self) -> dict[str, Any]:
        """For bench.json."""
        record: dict[str, Any] = self.runs[-1].record()
        return record


def with_server(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `server` by the options."""
    shown = list(inspect.signature(_options).parameters.values())

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        values = {one.name: arguments.pop(one.name) for one in shown}
        if values["endpoint"] is None:
            if unused := [name for name, value in values.items() if value]:
                named = ", ".join("--" + name.replace("_", "-") for name in unused)
                raise UsageError(f"without a server {named} would not be used",
                                 hint="name it: --endpoint URL")  # fmt: skip
            command(**arguments)
        else:
            command(**arguments, **{PLACE: Server(**values)})

    parameters = list(inspect.signature(command).parameters.values())
    at = next(i for i, one in enumerate(parameters) if one.name == PLACE)
    parameters[at : at + 1] = shown
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
