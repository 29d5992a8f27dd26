"""How long a whole step of the decoding loop takes on this machine for N nodes.

Timings jitter, so each size is measured next to one-node steps, and its ratio to those counts.
A machine may be slow for a tenth of a second, so where nothing is packed anew for a size, all sizes
take turns in several rounds, and the median over these counts.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.repeated_steps import RepeatedSteps
from medusa_kit.infer.decode.timing import Clock
from medusa_kit.infer.mkl_linear import pack_for_rows
from medusa_kit.tree.plan import Tree

PREFIX_LENGTHS = (64, 384)
REPEATS, ROUNDS = 7, 9


def measure_step_times(
    engine: Engine,
    trees: Mapping[Any, Tree],
    prefix_lengths: Sequence[int] = PREFIX_LENGTHS,
    repeats: int = REPEATS,
    batch_size: int = 1,
    num_unread: int = 0,
    clock: Clock = time.perf_counter,
) -> dict[Any, float]:
    """Seconds of a step for each tree, under its own key, averaged over the prefix lengths.

    Key 1 is always there: plain decoding, one node. A batch is that many rows of one length.
    `num_unread`: tokens that steps read in front of a chain (infer/chains/).
    """
    assert engine.heads is not None
    context = engine.base.info.context_length
    prefix_lengths = [min(length, context // 2) for length in prefix_lengths]
    plain = PlainDrafter(engine.base.device)
    steps = [
        RepeatedSteps(engine.verifier, _random_prompts(engine, length, batch_size), clock)
        for length in prefix_lengths
    ]
    rounds = ROUNDS if engine.verifier.reads_packed_weights else 1
    ratios: dict[Any, list[float]] = {key: [] for key in trees}
    plain_times: list[float] = []
    drafters: dict[Any, Drafter] = {
        key: draft_with(engine.heads, tree) if tree.num_nodes > 1 else plain
        for key, tree in sorted(trees.items(), key=lambda item: item[1].num_nodes)
    }
    with console.progress("timing steps", rounds * len(trees), "trees") as bar:
        for _ in range(rounds):
            for key, drafter in drafters.items():
                pack_for_rows(engine.base.own_modules(), trees[key].num_nodes * batch_size)
                count = -(-repeats // rounds)
                unread = num_unread if trees[key].num_nodes > 1 else 0
                pairs = [(_median(times, drafter, count, unread), _median(times, plain, count))
                         for times in steps]  # fmt: skip
                ratios[key].append(statistics.mean(tree_time / times for tree_time, times in pairs))
                plain_times += [times for _, times in pairs]
                bar.advance()
    one_node = statistics.median(plain_times)
    medians = {key: one_node * statistics.median(several) for key, several in ratios.items()}
    return {**medians, 1: one_node}


def _median(steps: RepeatedSteps, drafter: Drafter, repeats: int, num_unread: int = 0) -> float:
    timings = steps.settled(drafter, max(repeats, 2), num_unread)
    return statistics.median(timing.seconds for timing in timings)


def _random_prompts(engine: Engine, length: int, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    size = engine.base.info.vocab_size
    prompts: list[list[int]] = torch.randint(0, size, (count, length), generator=generator).tolist()
    return prompts
