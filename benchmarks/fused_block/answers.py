"""Part c. Whole answers of a real model with its heads: equal to plain decoding, and how fast.

It needs pydantic, and for a GGUF file gguf (`benchmarks/gpu/wheels.py` collects what is missing).
"""

import time
from argparse import Namespace
from typing import Any

from benchmarks.fused_block.__main__ import Findings
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import build_engine
from medusa_kit.infer.device import fused_model
from medusa_kit.infer.device.fused_model import EXACT, FAST
from medusa_kit.settings.engine import EngineOptions

TOKENS = 128
TASKS = (
    "Write a Python function that merges two sorted lists.",
    "Write a Python class for a bank account with deposit and withdraw.",
    "Explain what a hash table is in three sentences.",
    "Write a SQL query for the ten customers with the most orders.",
    "Write a JavaScript function that debounces another function.",
    "List the prime numbers below 60.",
    "Write a bash script that renames all .txt files to .md.",
    "Translate to French: The weather is fine today.",
    "Write a Python function that parses a CSV line with quotes.",
    "What does the `yield` keyword do in Python?",
    "Write a regular expression for an ISO date, and test it.",
    "Write a binary search in C.",
    "Refactor: for i in range(len(a)): print(a[i])",
    "Write unit tests for a function `is_leap_year`.",
    "Write a Dockerfile for a Flask app.",
    "Count the vowels of a string in Rust.",
)


def run(findings: Findings, options: Namespace) -> None:
    base = load_base_model(options.model or "debug-tiny", dtype="auto" if options.dry_run else
                           "bfloat16")  # fmt: skip
    tasks = TASKS[:2] if options.dry_run else TASKS
    modes = (FAST,) if options.dry_run else (None, EXACT, FAST)
    for mode in modes:
        engine = None

        def begin(mode: str | None = mode) -> dict[str, Any]:
            nonlocal engine
            engine = engine_of(base, options, mode)
            return {"steps_run_by": engine.verifier.steps_run_by}

        findings.measure(f"load {mode or 'torch'}", begin)
        if engine is None:
            continue
        plain = dict[int, list[int]]()
        drafters = ["none"] if engine.heads is None else ["none", "medusa", "auto"]
        for drafter in drafters:
            findings.measure(
                f"{mode or 'torch'}, drafter {drafter}",
                lambda e=engine, d=drafter, p=plain: answers(e, d, tasks, p, options.dry_run),
            )


def engine_of(base: BaseModel, options: Namespace, mode: str | None) -> Engine:
    fused_model.MODE = mode
    try:
        return build_engine(base, EngineOptions(heads=options.heads, fixed_shapes="always"))
    finally:
        fused_model.MODE = None


def answers(
    engine: Engine, drafter: str, tasks: tuple[str, ...], plain: dict[int, list[int]], tiny: bool
) -> dict[str, Any]:
    """Tokens a second over all answers, one at a time, and how many equal the plain ones, which
    the first call leaves in `plain`."""
    tokens = 4 if tiny else TOKENS
    engine.generate(tasks[0], max_new_tokens=tokens, drafter=drafter)  # captures and compiles
    count, start = 0, time.perf_counter()
    results = [engine.generate(task, max_new_tokens=tokens, drafter=drafter) for task in tasks]
    seconds = time.perf_counter() - start
    for number, result in enumerate(results):
        plain.setdefault(number, list(result.token_ids))
        count += len(result.token_ids)
    equal = sum(plain[number] == list(one.token_ids) for number, one in enumerate(results))
    steps = sum(result.stats.num_steps for result in results)
    return {"tokens_per_second": count / seconds, "tokens_per_step": count / max(steps, 1),
            "equal_to_plain": f"{equal} of {len(results)}",
            "steps_run_by": results[-1].stats.steps_run_by}  # fmt: skip
