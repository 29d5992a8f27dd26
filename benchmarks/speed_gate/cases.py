"""What is compared: setups (one process and what it loads), and the cases that share them."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rounds import Kind

MODEL = "smollm2-135m-instruct"
TASKS = ("summarization", "math_reasoning")
KINDS: dict[str, Kind] = {"tokens/s": "speed", "updates/s": "speed", "seconds": "cost",
                          "MB": "cost", "waits": "count", "captures": "count"}  # fmt: skip
NO_COMPILER = {"MEDUSA_KIT_NATIVE": "0"}
GENERATED, ANSWERS = 16, 24  # prompts, and answers that are trained on
RECIPE = """
output_dir: run
base: {{model: {model}, dtype: float32}}
heads: {{kind: medusa, num_heads: 2, projection: reduced, reduced_size: 128}}
data: {{sources: [answers.jsonl], eval_fraction: 1.0e-9, train_on: answers}}
train: {{epochs: 4, micro_batch_positions: 64, loss: cross_entropy, precision: float32,
  features: memory, log_every: 1, eval_every: 1000000, save_every: 1000000}}
deepspeed: {{enabled: false}}
"""


@dataclass(frozen=True)
class Setup:
    """`first`: the command with which a worker begins."""

    first: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def engine(
        cls, model: str = MODEL, own: Mapping[str, str] | None = None, **options: Any
    ) -> Any:
        return cls({"do": "load", "model": model, **options}, own or {})


@dataclass(frozen=True)
class Case:
    """`each`: questions a round; `task`: of which category, None for the usual prompts."""

    name: str
    setup: str
    command: Mapping[str, Any]
    each: int = 2
    task: str | None = None


def setups(q4_k: Path, level: str) -> dict[str, Setup]:
    return {
        "float32": Setup.engine(),
        "int16": Setup.engine(activations="int16"),
        "Q4_K": Setup.engine(str(q4_k), heads="none"),
        "no compiler": Setup.engine(own=NO_COMPILER, dtype="float32"),
        "bfloat16": Setup.engine(dtype="bfloat16"),
        "other instructions": Setup.engine(own={"MEDUSA_KIT_ISA": level}),
        "server": Setup({"do": "serve", "model": MODEL}),
        "commands": Setup(),
        # All guesses are verified: else measured times decide, and counts differ from run to run.
        "stand-in": Setup(
            {
                "do": "stand_in",
                "model": "debug-tiny",
                "heads": "untrained",
                "guesses": "all",
                "fixed_shapes": "always",
            }
        ),
    }


def cases(tokens: int, folder: Path) -> list[Case]:
    """Answers of so many tokens; those of slow paths are shorter."""

    def answer(drafter: str, length: int = tokens, **asked: Any) -> dict[str, Any]:
        return {"do": "answer", "figure": "tokens/s", "drafter": drafter,
                "max_new_tokens": length, **asked}  # fmt: skip

    found = []
    for precision in ("float32", "int16"):
        found += [
            Case(f"{precision}-{name}", precision, answer(drafter))
            for name, drafter in (("plain", "none"), ("heads", "medusa"), ("auto", "auto"))
        ]
        found += [Case(f"{precision}-auto-{task}", precision, answer("auto"), task=task)
                  for task in TASKS]  # fmt: skip
    short = max(tokens // 2, 2)
    first = {"do": "answer", "figure": "seconds", "drafter": "auto", "max_new_tokens": 2}
    generate = ["data", "generate", str(folder / "prompts.jsonl"), "-o", "{folder}/answers.jsonl",
                "-m", MODEL, "-n", str(tokens)]  # fmt: skip
    train = ["train", str(folder / "recipe.yaml"), "output_dir={folder}/run"]
    start = ["generate", "Hello", "-m", MODEL, "-n", "1"]
    return [
        *found,
        Case("sampled", "float32", answer("auto", temperature=0.8, seed=1)),
        Case("context-4k-plain", "float32", answer("none", short), task="4k"),
        Case("context-4k-auto", "float32", answer("auto", short), task="4k"),
        Case("reused-prefix", "float32", first, task="1k"),
        Case("Q4_K-plain", "Q4_K", answer("none", short), task="ids"),
        Case("no-compiler-heads", "no compiler", answer("medusa", short)),
        Case("bfloat16-heads", "bfloat16", answer("medusa", short)),
        Case("other-instructions-auto", "other instructions", answer("auto")),
        Case("server-8", "server", {"do": "clients", "tokens": short}, each=1, task="8"),
        Case("data-generate", "commands", {"do": "command", "arguments": generate,
                                           "work": GENERATED * tokens}, 1, "none"),
        Case("training", "commands", {"do": "command", "arguments": train}, 1, "none"),
        Case("start-and-memory", "commands", {"do": "command", "arguments": start}, 1, "none"),
        Case("stand-in-counts", "stand-in", {"do": "counts", "drafter": "medusa",
                                             "max_new_tokens": 16}, 1, "text"),
    ]  # fmt: skip


class Questions:
    """What a case asks, from files of rows with `turns`: in each round something new."""

    def __init__(self, prompts: Path, tasks: Path | None) -> None:
        self._of: dict[str | None, list[str]] = {None: _first_turns(prompts)}
        for task in TASKS if tasks else ():
            self._of[task] = _first_turns(tasks, task)

    def lacks(self, case: Case) -> str | None:
        """Why a case can't be run, or None."""
        if case.task in TASKS and not self._of.get(case.task):
            return f"no rows of category {case.task}: give TASKS=file"
        return None

    def of(self, case: Case, number: int) -> Any:
        """The command of question `number`, from 0."""
        texts, drawn = self._of.get(case.task, self._of[None]), random.Random(number)
        ids = {"ids": 64, "1k": 1000, "4k": 3900}
        if case.task == "none":
            return case.command
        if case.task == "8":
            return {
                **case.command,
                "prompts": [texts[(8 * number + n) % len(texts)] for n in range(8)],
            }
        if case.task in ids:  # the same long beginning, so that only the first question reads it
            begun = random.Random(case.task).choices(range(1000, 16000), k=ids[case.task])
            return {**case.command, "prompt": begun + drawn.choices(range(1000, 16000), k=24)}
        if case.task == "text":
            return {**case.command, "prompt": texts[number % len(texts)][:100]}
        asked = [{"role": "user", "content": texts[number % len(texts)]}]
        return {**case.command, "prompt": asked}

    def write(self, folder: Path) -> None:
        """Prompts for `data generate`; a recipe, and answers of random tokens for `train`."""
        texts, drawn = self._of[None], random.Random(0)
        rows: list[dict[str, Any]] = [
            {"id": str(n), "messages": [{"role": "user", "content": texts[n % len(texts)][:400]}]}
            for n in range(GENERATED)
        ]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
        rows = [
            {"id": str(n), "prompt_ids": drawn.choices(range(10, 250), k=16),
             "response_ids": drawn.choices(range(10, 250), k=64), "finish_reason": "length"}
            for n in range(ANSWERS)
        ]  # fmt: skip
        (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
        (folder / "recipe.yaml").write_text(RECIPE.format(model=MODEL), "utf-8")


def _first_turns(path: Path, category: str | None = None) -> list[str]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["turns"][0] if "turns" in row else row["messages"][0]["content"] for row in rows
            if category is None or row.get("category") == category]  # fmt: skip
