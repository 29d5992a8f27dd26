"""Whole answers to real prompts: transformers, llama-server and this kit, by `bench`, in turn."""

from collections.abc import Mapping, Sequence
from typing import Any

from medusa_kit.bench.bench import Method, bench
from medusa_kit.bench.methods import check_room, engine_method, standard_methods
from medusa_kit.bench.report import ONE_NODE, BenchReport
from medusa_kit.cli.bench_endpoint import Served, Server
from medusa_kit.cli.prompts import read_prompt_set
from medusa_kit.settings.sampling import SamplingParams

GREEDY = SamplingParams()


class Answers:
    """An engine and prompts, beside servers by their names."""

    def __init__(self, engine: Any, prompts: str | None, limit: int | None, tokens: int) -> None:
        self.engine, self.tokens = engine, tokens
        self._asked = read_prompt_set(prompts, limit)
        self._ids = [engine.encode(messages) for messages, _ in self._asked]
        check_room(engine.base, self._ids)

    def beside_transformers(
        self, oracle: Any, drafters: Sequence[str], servers: Mapping[str, str]
    ) -> BenchReport:
        """All of them, against transformers generate."""
        methods = standard_methods(
            {"medusa-kit": self.engine}, oracle, self.tokens, peers=["prompt-lookup"],
            drafters=drafters,
        )  # fmt: skip
        return self._run([*methods, *self._servers(servers)])

    def by_guessing(self, drafters: Sequence[str], servers: Mapping[str, str]) -> BenchReport:
        """Our drafters against our one node, and servers that guess beside one that does not."""
        named = {f"medusa-kit, {name}": name for name in drafters}
        methods = [
            engine_method(name, self.engine, self.tokens, GREEDY, drafter)
            for name, drafter in {ONE_NODE: "none", **named}.items()
        ]
        return self._run([*methods, *self._servers(servers)])

    def _run(self, methods: Sequence[Method]) -> BenchReport:
        categories = [category for _, category in self._asked]
        return bench(methods, self._ids, self.tokens, categories=categories)

    def _servers(self, servers: Mapping[str, str]) -> list[Method]:
        return [
            self._served(name, url).beside(self._asked, self._ids, self.engine.base.tokenizer)
            for name, url in servers.items()
        ]

    def _served(self, name: str, url: str) -> Served:
        server = Server(url, name, False, None, None, None, None)
        return server.open(name, self.tokens, GREEDY)
