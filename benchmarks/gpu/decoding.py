"""Whole answers, greedy and sampled, with guesses that are right as often as a given acceptance
length requires; drafts of random heads.

Shapes: D hidden, B batch, N nodes with root.
"""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.baseline import baseline_name
from benchmarks.gpu.known_text import (
    NUM_HEADS,
    PROMPT,
    KnownText,
    answer_length,
    check_text,
    rule_name,
    share_for,
    some_prompts,
    tree_of,
)
from benchmarks.gpu.runner import Part
from benchmarks.gpu.steps import PREFIX, loose_forwards, random_heads, timed_steps
from benchmarks.gpu.workbench import CAPTURED, StepMode, Workbench
from medusa_kit.bench.gpu.shapes import Shape
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.drafters.heads.medusa import HeadsDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import MedusaKitError

ACCEPTANCE = 2.6  # tokens a step, as in the goal
NODES = 64
TEMPERATURE = 0.7
ROUNDS = 2


def our_answer(
    shape: Shape, mode: StepMode, temperature: float, acceptance: float | None, bench: Workbench
) -> dict[str, Any]:
    """`acceptance`: the acceptance length to reach; None decodes one node a step."""
    engine = bench.engine(shape, mode)
    drafter = "none" if acceptance is None else "medusa"
    engine.heads = None
    if acceptance is not None:
        with_known_text(bench, engine, shape, acceptance)
    (prompt,), tokens = some_prompts(bench, shape, bench.size(PROMPT, 12)), answer_length(bench)
    loose = loose_forwards(engine)
    results = []

    def answer() -> None:
        results.append(
            engine.generate(prompt, max_new_tokens=tokens, drafter=drafter, temperature=temperature)
        )

    seconds = bench.clock.each(answer, bench.size(ROUNDS, 1), 1).median
    ours = results[-1]
    captured = "fixed shapes" in ours.stats.steps_run_by and loose_forwards(engine) == loose
    if captured != mode.captured:
        raise MedusaKitError(f"not all forwards of the answer were ({mode})")
    if temperature == 0:
        check_text(bench, shape, prompt, ours.token_ids)
    theirs = bench.figures(baseline_name(shape, temperature)).get("tokens_per_second")
    rate = len(ours.token_ids) / seconds
    return {
        "tokens": len(ours.token_ids),
        "tokens_per_second": rate,
        "acceptance_length": ours.stats.acceptance_length,
        "against_transformers": theirs and rate / theirs,
        "run_by": ours.stats.steps_run_by,
    }


def with_known_text(
    bench: Workbench,
    engine: Engine,
    shape: Shape,
    acceptance: float = ACCEPTANCE,
    nodes: int = NODES,
) -> None:
    """Let an engine have heads that are right as often as this acceptance length requires."""
    share = share_for(acceptance)
    engine.heads = KnownText.of(engine.base, bench.successors(shape), share)
    engine.use_tree(tree_of(nodes))


@torch.inference_mode()
def draft(shape: Shape, mode: StepMode, kind: str, bench: Workbench) -> dict[str, Any]:
    """Random heads: the time of a draft alone, and of a step with it, since both read memory."""
    engine = bench.engine(shape, mode)
    heads = random_heads(engine, kind)
    drafter = draft_with(heads, tree_of(NODES))
    hidden_BD = torch.randn(1, shape.hidden_size, device=bench.device, dtype=bench.dtype)
    roots_B = torch.zeros(1, device=bench.device, dtype=torch.int64)
    assert isinstance(drafter, HeadsDrafter)  # as for any static tree
    fill = partial(drafter.fill, hidden_BD, roots_B)
    repeats = bench.size(20, 1)
    found = {
        "heads": NUM_HEADS,
        "nodes": drafter.num_nodes,
        "ms": 1e3 * bench.clock.together(bench.clock.replayable(fill), repeats),
        "loop_ms": 1e3 * bench.clock.together(fill, repeats),
    }
    prefix = bench.size(PREFIX, 12)
    stepped = timed_steps(bench, engine, shape, drafter, prefix)
    return found | {"step_ms": stepped["ms"], "step_times_floor": stepped["times_floor"]}


def answer_part(
    shape: Shape, temperature: float, acceptance: float | None, mode: StepMode = CAPTURED
) -> Part:
    run = partial(our_answer, shape, mode, temperature, acceptance)
    return Part(answer_name(shape, temperature, acceptance, mode), "answers", run, 8.0, shape.name)


def answer_name(
    shape: Shape, temperature: float, acceptance: float | None, mode: StepMode = CAPTURED
) -> str:
    drafts = "plain decoding" if acceptance is None else f"acceptance {acceptance}"
    return f"{shape.name}: medusa-kit, {rule_name(temperature)}, {drafts} ({mode})"


def draft_part(shape: Shape, kind: str, mode: StepMode = CAPTURED) -> Part:
    name = f"{shape.name}: draft of {kind} heads"
    return Part(name, "drafts", partial(draft, shape, mode, kind), 8.0, shape.name)
