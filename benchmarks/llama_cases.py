"""What llama.cpp and this kit measure in turn, part by part, on one GGUF file."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_tools
from own_speed import OwnSpeed
from process_cost import Cost, cost_of
from side_by_side import MEGABYTES, MILLISECONDS, OURS, RATE, SECONDS, THEIRS, Case

from medusa_kit import console

PARTS = START, PROMPTS, DECODE, STEPS, MEMORY, ANSWERS, GUESSING = (
    "start", "prompt", "decode", "step", "memory", "answers", "guessing",
)  # fmt: skip
MESSAGE = "Hi"
LONG_MESSAGE = "Write a long story about a lighthouse keeper, a storm and a ship."


class Cases:
    """The cases of each part, for a model: `name` as ours is told it, `gguf` as theirs."""

    def __init__(self, given: argparse.Namespace, name: str, gguf: Path, engine: Any) -> None:
        self.given, self.name, self.gguf, self.own = given, name, gguf, OwnSpeed(engine)
        self.about: dict[str, Any] = {}  # what llama-bench says of itself

    def of(self, part: str) -> list[Case]:
        make: dict[str, Callable[[], Iterator[Case]]] = {
            START: self._start, PROMPTS: self._prompts, DECODE: self._decode, STEPS: self._steps,
            MEMORY: self._memory,
        }  # fmt: skip
        return list(make[part]()) if part in make else []

    def _start(self) -> Iterator[Case]:
        yield Case(START, "generate -n 1, all of it", SECONDS, {
            OURS: lambda: self.generate(MESSAGE, 1).seconds,
            THEIRS: lambda: self._ask(MESSAGE, 1).seconds,
        })  # fmt: skip
        yield Case(START, "chat, to the first token", SECONDS, {
            OURS: lambda: _first(self._chat()),
            THEIRS: lambda: _first(self._ask(MESSAGE, 1, piped=True)),
        })  # fmt: skip

    def _prompts(self) -> Iterator[Case]:
        for size in self.given.prompt_sizes:
            yield Case(PROMPTS, str(size), RATE, {
                OURS: lambda size=size: size / statistics.median(self.own.prompt(size)),
                THEIRS: lambda size=size: size / self._bench(prompt=size),
            })  # fmt: skip

    def _decode(self) -> Iterator[Case]:
        tokens = self.given.tokens
        for depth in self.given.depths:
            yield Case(DECODE, f"depth {depth}", RATE, {
                OURS: lambda depth=depth: 1 / self.own.decode(tokens, depth),
                THEIRS: lambda depth=depth: tokens / self._bench(new=tokens, depth=depth),
            })  # fmt: skip

    def _steps(self) -> Iterator[Case]:
        depth, repeats = self.given.step_depth, self.given.repeats
        for count in self.given.rows:
            yield Case(STEPS, str(count), MILLISECONDS, {
                OURS: lambda count=count: 1e3 * statistics.median(
                    self.own.steps(count, depth, repeats)
                ),
                THEIRS: lambda count=count: 1e3 * self._bench(
                    prompt=count, depth=depth, repeats=repeats
                ),
            })  # fmt: skip

    def _memory(self) -> Iterator[Case]:
        tokens = self.given.memory_tokens
        yield Case(MEMORY, f"{tokens} tokens", MEGABYTES, {
            OURS: lambda: self.generate(LONG_MESSAGE, tokens).peak_bytes / 1e6,
            THEIRS: lambda: self._ask(LONG_MESSAGE, tokens).peak_bytes / 1e6,
        })  # fmt: skip

    def warm_up(self) -> None:
        """One run of each program that is not counted: what it keeps on disk, and the file."""
        self.generate(MESSAGE, 1)
        self._ask(MESSAGE, 1)

    def generate(self, message: str, tokens: int) -> Cost:
        cost = self._own("generate", message, "-n", tokens, "--json")
        made = json.loads(cost.output)["stats"]["new_tokens"]
        if made < tokens:
            console.warn(f"the answer ended after {made} of {tokens} tokens")
        return cost

    def _chat(self) -> Cost:
        return self._own("chat", "--greedy", "-n", 1, input=f"{MESSAGE}\n")

    def _own(self, *arguments: object, input: str = "") -> Cost:
        command = [sys.executable, "-m", "medusa_kit", *arguments, "--model", self.name,
                   "--activations", self.given.activations]  # fmt: skip
        return cost_of(command, input, environment={"OMP_NUM_THREADS": str(self.given.threads)})

    def _ask(self, message: str, tokens: int, piped: bool = False) -> Cost:
        return llama_tools.ask(self.gguf, self.given.threads, message, tokens, piped)

    def _bench(self, **counts: int) -> float:
        """Median seconds of a repeat."""
        run = llama_tools.run_bench(self.gguf, self.given.threads, **counts)
        self.about = run.about
        return statistics.median(run.seconds)


def _first(cost: Cost) -> float:
    if cost.first_output_seconds is None:
        raise RuntimeError(f"no answer in {cost.output!r}")
    return cost.first_output_seconds
