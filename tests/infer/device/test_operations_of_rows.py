"""What a step launches on a device does not grow with its requests: their draws, their trees and
what is kept of them are one operation each for all."""

from typing import Any

import pytest
from support.cuda_stand_in import Device
from support.small_engines import build_engine, random_heads, random_prompt
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.tree.candidate_tree import CandidateTree

TREE = CandidateTree([(0,), (1,), (0, 0)])


def launches_a_step(device: Device, engine: Engine, rows: int, **options: Any) -> float:
    """Of long answers against short ones, so that prompts and ends do not count. All rows have one
    prompt, and end in the same step: each end is followed by a look at the model."""
    prompts = [random_prompt(5, 0)] * rows
    engine.generate(prompts, max_new_tokens=20, batch_size=rows, **options)  # captures
    found = []
    for tokens in (2, 20):
        with device.counted() as counts:
            results = engine.generate(prompts, max_new_tokens=tokens, batch_size=rows, **options)
        steps = max(result.stats.num_steps for result in results)
        found.append((steps, sum(counts.launches.values())))
    (few, short), (many, long) = found
    return (long - short) / (many - few)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("drafter", ["none", "medusa"])
def test_rows_share_operations(
    cuda_stand_in: Device, drafter: str, options: dict[str, Any]
) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    base = wrap_model(model.to("cuda"))
    engine = build_engine(base, heads=random_heads(base).to("cuda"), tree=TREE, prefix_cache="off")
    two, eight = (
        launches_a_step(cuda_stand_in, engine, rows, drafter=drafter, **options) for rows in (2, 8)
    )
    assert eight == two
