"""Whole answers by plain transformers and by us, greedy and sampled; guesses are right as often as
a given acceptance length requires.

Shapes: D hidden, B batch, N nodes with root.
"""

from functools import partial
from typing import Any

import torch

from medusa_kit.bench.gpu.known_text import NUM_HEADS, KnownText, share_for, tree_of
from medusa_kit.bench.gpu.runner import Part
from medusa_kit.bench.gpu.shapes import Shape
from medusa_kit.bench.gpu.steps import PREFIX, loose_forwards, some_prompts, timed_steps
from medusa_kit.bench.gpu.workbench import CAPTURED, StepMode, Workbench
from medusa_kit.bench.oracle import Oracle
from medusa_kit.drafters import draft_with
from medusa_kit.drafters.heads.medusa import HeadsDrafter
from medusa_kit.errors import MedusaKitError
from medusa_kit.heads import MedusaHeads

ACCEPTANCE = 2.6  # tokens a step, as in the goal
NODES = 64
PROMPT, ANSWER = 128, 96
TEMPERATURE = 0.7
ROUNDS = 2


def transformers_answer(shape: Shape, temperature: float, bench: Workbench) -> dict[str, Any]:
    """transformers' own generate on an unchanged model."""
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
    shape: Shape, mode: StepMode, temperature: float, acceptance: float | None, bench: Workbench
) -> dict[str, Any]:
    """`acceptance`: the acceptance length to reach; None decodes one node a step."""
    engine = bench.engine(shape, mode)
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
    if ("fixed shapes" in ours.stats.steps_run_by) != mode.captured or loose_forwards(engine):
        raise MedusaKitError(f"not all forwards of the answer were ({mode})")
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


def _answer_length(bench: Workbench) -> int:
    return bench.size(ANSWER, 12)


def _check_text(bench: Workbench, shape: Shape, prompt: list[int], answer: list[int]) -> None:
    """Raises MedusaKitError where greedy text, which is known beforehand, is wrong."""
    next_V, token = bench.successors(shape).tolist(), prompt[-1]
    for place, found in enumerate(answer):
        token = next_V[token]
        if found != token:
            raise MedusaKitError(f"token {place} of the greedy answer is {found}, not {token}")


@torch.inference_mode()
def draft(shape: Shape, mode: StepMode, kind: str, bench: Workbench) -> dict[str, Any]:
    """Random heads: the time of a draft alone, and of a step with it, since both read memory."""
    engine = bench.engine(shape, mode)
    heads = MedusaHeads.for_base(engine.base, NUM_HEADS, kind=kind)  # type: ignore[arg-type]
    heads.requires_grad_(False)
    for parameter in heads.parameters():
        parameter.normal_(std=0.02)
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


def transformers_part(shape: Shape, temperature: float = 0.0) -> Part:
    run = partial(transformers_answer, shape, temperature)
    return Part(transformers_name(shape, temperature), "answers", run, 15.0, shape.name)


def transformers_name(shape: Shape, temperature: float) -> str:
    return f"{shape.name}: transformers generate, {_rule(temperature)}"


def answer_part(
    shape: Shape, temperature: float, acceptance: float | None, mode: StepMode = CAPTURED
) -> Part:
    run = partial(our_answer, shape, mode, temperature, acceptance)
    return Part(answer_name(shape, temperature, acceptance, mode), "answers", run, 8.0, shape.name)


def answer_name(
    shape: Shape, temperature: float, acceptance: float | None, mode: StepMode = CAPTURED
) -> str:
    drafts = "plain decoding" if acceptance is None else f"acceptance {acceptance}"
    return f"{shape.name}: medusa-kit, {_rule(temperature)}, {drafts} ({mode})"


def draft_part(shape: Shape, kind: str, mode: StepMode = CAPTURED) -> Part:
    name = f"{shape.name}: draft of {kind} heads"
    return Part(name, "drafts", partial(draft, shape, mode, kind), 8.0, shape.name)


def _rule(temperature: float) -> str:
    return "greedy" if temperature == 0 else "sampled"
