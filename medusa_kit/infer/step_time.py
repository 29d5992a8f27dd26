"""How long a whole step takes on this machine for N nodes: draft, verify, accept, commit.

Machines are noisy, so each size is measured in turn with one-node steps beside it, and its ratio to
those is what counts.

Shapes: B batch, N nodes with root.
"""

import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from medusa_kit import console
from medusa_kit.infer.acceptance import accept
from medusa_kit.infer.drafters import draft_with
from medusa_kit.infer.drafters.base import Drafter, State, path_to
from medusa_kit.infer.drafters.plain import PlainDrafter
from medusa_kit.infer.engine import Engine
from medusa_kit.infer.packed_linear import pack_for_rows
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.tree.candidate_tree import CandidateTree

PREFIX_LENGTHS = (64, 384)
REPEATS = 7


@torch.inference_mode()
def measure_step_times(
    engine: Engine,
    trees: Mapping[int, CandidateTree],
    prefix_lengths: Sequence[int] = PREFIX_LENGTHS,
    repeats: int = REPEATS,
) -> dict[int, float]:
    """Seconds of a step for each size N, averaged over the prefix lengths; batch 1."""
    assert engine.heads is not None
    context = engine.base.info.context_length
    prefix_lengths = [min(length, context // 2) for length in prefix_lengths]
    plain = PlainDrafter(engine.base.device)
    places = [_Place(engine, length, max(trees)) for length in prefix_lengths]
    ratios: dict[int, float] = {}
    plain_times: list[float] = []
    with console.progress("timing steps", len(trees), "sizes") as bar:
        for size, tree in sorted(trees.items()):
            drafter = draft_with(engine.heads, tree) if size > 1 else plain
            pack_for_rows(engine.base.model, size)
            pairs = [place.compare(drafter, plain, repeats) for place in places]
            ratios[size] = statistics.mean(ours / one for ours, one in pairs)
            plain_times += [one for _, one in pairs]
            bar.advance()
    one_node = statistics.median(plain_times)
    ratios[1] = 1.0
    return {size: one_node * ratio for size, ratio in sorted(ratios.items())}


class _Place:
    """A prefix of some length, from which steps are taken again and again."""

    def __init__(self, engine: Engine, prefix_length: int, max_nodes: int) -> None:
        self.engine = engine
        generator = torch.Generator().manual_seed(prefix_length)
        size = engine.base.info.vocab_size
        prompt = torch.randint(0, size, (prefix_length,), generator=generator).tolist()
        self.cache: TreeCache = engine.verifier.new_cache(1, prefix_length + max_nodes)
        hidden_BD, logits_BV = engine.verifier.prefill(self.cache, [prompt])
        self.state = State([prompt], [int(logits_BV.argmax())], hidden_BD)

    def compare(self, drafter: Drafter, plain: Drafter, repeats: int) -> tuple[float, float]:
        """Median seconds of a step with `drafter` and with `plain`, taken in turn."""
        self._step(drafter)  # packs, warms up
        ours, one = [], []
        for _ in range(repeats):
            ours.append(self._timed(drafter))
            one.append(self._timed(plain))
        return statistics.median(ours), statistics.median(one)

    def _timed(self, drafter: Drafter) -> float:
        start = time.perf_counter()
        self._step(drafter)
        if self.engine.base.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _step(self, drafter: Drafter) -> None:
        draft = drafter.propose(self.state)
        _, logits_BNV = self.engine.verifier.forward(
            self.cache, draft.tokens_BN, draft.depths_BN, draft.sees_BNN
        )
        likeliest = self.engine.verifier.likeliest(logits_BNV)[0].tolist()
        parents = draft.topologies[0].parents
        accept(draft.tokens_BN[0].tolist(), parents, likeliest.__getitem__, len(parents))
        # Commit the costly case, the last node of the deepest path, and go back to the prefix.
        before = list(self.cache.lengths)
        self.cache.commit([path_to(len(parents) - 1, parents)])
        self.cache.lengths = before
