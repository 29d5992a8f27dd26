"""A shared batch under load, as a server has it: clients that ask again after a random pause."""

import random
import statistics
import time
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any

from benchmarks.gpu.decoding import with_known_text
from benchmarks.gpu.known_text import some_prompts
from benchmarks.gpu.runner import Part
from benchmarks.gpu.steps import loose_forwards
from benchmarks.gpu.workbench import CAPTURED, Workbench
from medusa_kit.bench.gpu.shapes import Shape
from medusa_kit.bench.load.arrivals import Closed
from medusa_kit.infer.device.captured import MAX_NODES

PROMPT, ANSWER, ROUNDS = 256, 128, 3  # each client asks that often
# Seconds on average, between an answer and the same client's next request.
PAUSE, SMALL_PAUSE = 0.1, 0.001
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"drafter": "medusa"},
    "auto": {"drafter": "auto"},
    "sampled": {"drafter": "medusa", "temperature": 0.7},
}
Told = list[tuple[float, int]]  # when tokens came, and how many


def load(shape: Shape, clients: int, kind: str, bench: Workbench) -> dict[str, Any]:
    """Raises what a request failed of."""
    clients = bench.size(clients, min(clients, 3))
    engine = bench.engine(shape, CAPTURED)
    nodes = bench.size(nodes_for(clients), 8)
    with_known_text(bench, engine, shape, nodes=nodes)
    prompts = some_prompts(bench, shape, bench.size(PROMPT, 12), clients * bench.size(ROUNDS, 1))
    tokens, loose = bench.size(ANSWER, 8), loose_forwards(engine)
    pauses, lock = random.Random(0), Lock()
    answers: list[tuple[float, Told]] = []
    start = time.perf_counter()
    with engine.shared_batch(max_rows=clients) as batch:
        ready = time.perf_counter()

        def ask(prompt: list[int], due: float) -> None:
            with lock:
                pause = pauses.expovariate(1 / (SMALL_PAUSE if bench.small else PAUSE))
            time.sleep(pause)
            told: Told = []
            asked = time.perf_counter()
            options = {"max_new_tokens": tokens, **KINDS[kind]}

            def came(ids: list[int]) -> None:
                told.append((time.perf_counter(), len(ids)))

            batch.submit(prompt, on_tokens=came, **options).result()
            answers.append((asked, told))

        Closed(clients).run(prompts, ask, ready)
    return {
        "clients": clients,
        "nodes": nodes,
        "start_seconds": ready - start,  # most of it captures
        **_figures(ready, answers),
        "loose_forwards": loose_forwards(engine) - loose,
        "run_by": engine.steps_run_by,
    }


def nodes_for(clients: int) -> int:
    """Of each row's tree: as many as one captured forward has room for, 64 at most."""
    return max(1, min(64, MAX_NODES // 2 // clients))


def _figures(start: float, answers: list[tuple[float, Told]]) -> dict[str, Any]:
    came = [[(at, count) for at, count in told if count] for _, told in answers]
    tokens = sum(count for told in came for _, count in told)
    ended = max(told[-1][0] for told in came)
    first = [1e3 * (told[0][0] - asked) for (asked, _), told in zip(answers, came, strict=True)]
    waits = [1e3 * (after - before) for told in came for (before, _), (after, _) in pairwise(told)]
    steps = len(waits)
    return {
        "answers": len(answers),
        "tokens": tokens,
        "tokens_per_second": tokens / (ended - start),
        "acceptance_length": (tokens - len(answers)) / steps if steps else None,
        "first_token_ms": statistics.median(first),
        "first_token_most_ms": max(first),
        "step_ms": statistics.median(waits) if waits else None,
        "step_most_ms": max(waits, default=None),
    }


def load_part(shape: Shape, clients: int, kind: str) -> Part:
    name = f"{shape.name}: {clients} clients, {kind}"
    return Part(name, "load", partial(load, shape, clients, kind), 15.0, shape.name)
