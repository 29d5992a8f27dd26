"""Whether tokens on this device are those of plain transformers, alone, in batches, in all modes.

Shapes: V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.known_text import KnownText, tree_of
from benchmarks.gpu.runner import Part
from benchmarks.gpu.workbench import CAPTURED, COMPILED, LOOP, StepMode, Workbench
from medusa_kit.bench.gpu.shapes import EXACTNESS, random_base, tiny
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.verify import difference_of
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import MedusaKitError
from medusa_kit.settings.sampling import SamplingParams

PROMPT_LENGTHS = (12, 31, 2, 90)
NODES = 16
GUESSED_RIGHT = 0.7  # share of right guesses


def exactness(mode: StepMode, dtype: torch.dtype, bench: Workbench) -> dict[str, Any]:
    """Raises MedusaKitError where a float32 answer differs by more than rounding."""
    bench.clear()
    shape = tiny(EXACTNESS) if bench.small else EXACTNESS
    oracle = Oracle(random_base(shape, bench.device, dtype, wide=True))
    tokens = bench.size(64, 10)
    prompts = _prompts(shape.vocab_size)
    with _no_tf32():
        expected = [oracle.generate(prompt, tokens)[0] for prompt in prompts]
        base = random_base(shape, bench.device, dtype, wide=True)
        engine = bench.engine_around(base, mode)
        next_V = _seen_next(expected, shape.vocab_size).to(bench.device)
        engine.heads = KnownText.of(base, next_V, GUESSED_RIGHT)
        engine.use_tree(tree_of(NODES))
        found = _compared(engine, oracle, prompts, expected, tokens)
    if found["beyond_rounding"] and dtype == torch.float32:
        raise MedusaKitError(
            f"{found['beyond_rounding']} of {found['answers']} greedy answers are not those of "
            f"plain transformers; the first differs at {found['first_difference']}"
        )
    return found | {"different_tokens": len({t for answer in expected for t in answer})}


def _compared(
    engine: Engine,
    oracle: Oracle,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    tokens: int,
) -> dict[str, Any]:
    identical = beyond = answers = 0
    steps = emitted = 0
    first = None
    for drafter in ("none", "medusa"):
        for batch_size in (1, len(prompts) - 1):
            results = engine.generate(
                prompts, max_new_tokens=tokens, drafter=drafter, batch_size=batch_size
            )
            for index, (result, right) in enumerate(zip(results, expected, strict=True)):
                answers += 1
                steps += result.stats.num_steps
                emitted += result.stats.new_tokens - 1
                if result.token_ids == right:
                    identical += 1
                    continue
                one = difference_of(
                    engine, oracle, SamplingParams(), index, prompts[index], tokens,
                    result.token_ids, right,
                )  # fmt: skip
                beyond += not one.is_rounding
                first = (
                    first
                    or f"token {one.position} of prompt {index} ({drafter}, batch of "
                    f"{batch_size}), margin {one.margin:.2g}, "
                    f"rounding tolerance {one.rounding_tolerance:.2g}"
                )
    return {
        "answers": answers,
        "identical": identical,
        "beyond_rounding": beyond,
        "first_difference": first,
        "acceptance_length": emitted / steps if steps else None,
        "run_by": results[-1].stats.steps_run_by,
    }


def _prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    sizes = [(length,) for length in PROMPT_LENGTHS]
    return [torch.randint(0, vocab_size, size, generator=generator).tolist() for size in sizes]


def _seen_next(answers: Sequence[list[int]], vocab_size: int) -> Tensor:
    """next_V: what followed each token where it last occurred in an answer; else the token itself.

    Guesses are then sometimes right and sometimes wrong.
    """
    next_V = torch.arange(vocab_size)
    for answer in answers:
        for token, following in pairwise(answer):
            next_V[token] = following
    return next_V


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Computes float32 products in float32: TF32's 19 bits are too few for a comparison."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def exactness_parts() -> list[Part]:
    modes = [(CAPTURED, torch.float32), (LOOP, torch.float32), (CAPTURED, torch.bfloat16)]
    return [_part(mode, dtype) for mode, dtype in modes]


def compiled_exactness_part() -> Part:
    return _part(COMPILED, torch.float32, 60.0)


def _part(mode: StepMode, dtype: torch.dtype, needs: float = 10.0) -> Part:
    name = f"greedy tokens, {str(dtype).removeprefix('torch.')} ({mode})"
    return Part(name, "exactness", partial(exactness, mode, dtype), needs)
