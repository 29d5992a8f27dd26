"""Whole answers: plain transformers, and ours, greedy and sampled, with guesses right as often as
a chosen acceptance length asks.

Shapes: D hidden, B batch, N nodes with root.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from medusa_kit.bench.gpu.known_text import NUM_HEADS, KnownText, share_for, tree_of
from medusa_kit.bench.gpu.runner import Part
from medusa_kit.bench.gpu.shapes import Shape
from medusa_kit.bench.gpu.steps import PREFIX, some_prompts, timed_steps
from medusa_kit.bench.gpu.workbench import CAPTURED, Way, Workbench
from medusa_kit.bench.oracle import Oracle
from medusa_kit.drafters import draft_with
from medusa_kit.errors import MedusaKitError
from medusa_kit.heads import MedusaHeads

ACCEPTANCE = 2.6  # tokens a step, those of the goal
NODES = 64
PROMPT, ANSWER = 128, 96
TEMPERATURE = 0.7
ROUNDS = 2


def transformers_answer(shape: Shape, temperature: float, bench: Workbench) -> dict[str, Any]:
    """transformers' own generate on a model that nothing of ours has touched."""
    oracle = Oracle(bench.untouched(shape))
    prompts, tokens = some_prompts(bench, shape, bench.size(PROMPT, 12)), _answer_length(bench)

    answers: list[list[int]] = []

    def answer() -> None:
        answers.extend(oracle.generate_batch(prompts, tokens, temperature=temperature)[0])

    seconds = bench.clock.each(answer, bench.size(ROUNDS, 1), 1).median
    if temperature == 0:
        _check_text(bench, shape, prompts[0], answers[-1])
    return {"tokens": tokens, "tokens_per_second": tokens / seconds}


def our_answer(
    shape: Shape, way: Way, temperature: float, acceptance: float | None, bench: Workbench
) -> dict[str, Any]:
    """`acceptance`: tokens a step that guesses are made for; None decodes one node a step."""
    engine = bench.engine(shape, way)
    drafter = "none" if acceptance is None else "medusa"
    engine.heads = None
    if acceptance is not None:
        share = share_for(acceptance)
        engine.heads = KnownText.of(engine.base, bench.successors(shape), share)
        engine.use_tree(tree_of(NODES))
    (prompt,), tokens = some_prompts(bench, shape, bench.size(PROMPT, 12)), _answer_length(bench)
    results = []

    def answer() -> None:
        results.append(
            engine.generate(prompt, max_new_tokens=tokens, drafter=drafter, temperature=temperature)
        )

    seconds = bench.clock.each(answer, bench.size(ROUNDS, 1), 1).median
    ours = results[-1]
    _check_ran(_that_runs(way, temperature), ours.stats.steps_run_by)
    if temperature == 0:
        _check_text(bench, shape, prompt, ours.token_ids)
    theirs = bench.figures(transformers_name(shape, temperature)).get("tokens_per_second")
    rate = len(ours.token_ids) / seconds
    return {
        "tokens": len(ours.token_ids),
        "tokens_per_second": rate,
        "acceptance_length": ours.stats.acceptance_length,
        "against_transformers": theirs and rate / theirs,
        "run_by": ours.stats.steps_run_by,
    }


def _that_runs(way: Way, temperature: float) -> Way:
    """Of sampled answers the loop, whatever the engine: captured steps are greedy ones."""
    return way if temperature == 0 else replace(way, captured=False, compiled=False)


def _check_ran(way: Way, run_by: str) -> None:
    if ("fixed shapes" in run_by) != way.captured:
        raise MedusaKitError(f"the answer is no figure of ({way}): its steps were run by {run_by}")


def _answer_length(bench: Workbench) -> int:
    return bench.size(ANSWER, 12)


def _check_text(bench: Workbench, shape: Shape, prompt: list[int], answer: list[int]) -> None:
    """Greedy text is known beforehand, so a speed that is not of this text is not recorded."""
    next_V, token = bench.successors(shape).tolist(), prompt[-1]
    for place, found in enumerate(answer):
        token = next_V[token]
        if found != token:
            raise MedusaKitError(f"token {place} of the greedy answer is {found}, not {token}")


@torch.inference_mode()
def draft(shape: Shape, way: Way, kind: str, bench: Workbench) -> dict[str, Any]:
    """Random heads: their draft by itself, and a step with it, since they read memory too."""
    engine = bench.engine(shape, way)
    heads = MedusaHeads.for_base(engine.base, NUM_HEADS, kind=kind)  # type: ignore[arg-type]
    heads.requires_grad_(False)
    for parameter in heads.parameters():
        parameter.normal_(std=0.02)
    drafter = draft_with(heads, tree_of(NODES))
    hidden_BD = torch.randn(1, shape.hidden_size, device=bench.device, dtype=bench.dtype)
    roots_B = torch.zeros(1, device=bench.device, dtype=torch.int64)
    fill = partial(drafter.fill, hidden_BD, roots_B, on_device=True)  # type: ignore[attr-defined]
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


def transformers_part(shape: Shape, temperature: float = 0.0) -> Part:
    run = partial(transformers_answer, shape, temperature)
    return Part(transformers_name(shape, temperature), "answers", run, 15.0, shape.name)


def transformers_name(shape: Shape, temperature: float) -> str:
    return f"{shape.name}: transformers generate, {_rule(temperature)}"


def answer_part(
    shape: Shape, temperature: float, acceptance: float | None, way: Way = CAPTURED
) -> Part:
    run = partial(our_answer, shape, way, temperature, acceptance)
    return Part(answer_name(shape, temperature, acceptance, way), "answers", run, 8.0, shape.name)


def answer_name(
    shape: Shape, temperature: float, acceptance: float | None, way: Way = CAPTURED
) -> str:
    drafts = "one node" if acceptance is None else f"acceptance {acceptance}"
    return (
        f"{shape.name}: medusa-kit, {_rule(temperature)}, {drafts} ({_that_runs(way, temperature)})"
    )


def draft_part(shape: Shape, kind: str, way: Way = CAPTURED) -> Part:
    name = f"{shape.name}: draft of {kind} heads"
    return Part(name, "drafts", partial(draft, shape, way, kind), 8.0, shape.name)


def _rule(temperature: float) -> str:
    return "greedy" if temperature == 0 else "sampled"
