"""How long a whole step takes on this machine for N nodes: draft, verify, accept, commit.

Machines are noisy, so each size is measured in turn with one-node steps beside it, and its ratio to
those is what counts.

Shapes: B batch, N nodes with root.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.infer.acceptance import accept
from medusa_kit.infer.drafters import draft_with
from medusa_kit.infer.drafters.base import Drafter, State, path_to
from medusa_kit.infer.drafters.plain import PlainDrafter
from medusa_kit.infer.engine import Engine
from medusa_kit.infer.packed_linear import pack_for_rows
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.tree.plan import Tree

PREFIX_LENGTHS = (64, 384)
REPEATS = 7


@torch.inference_mode()
def measure_step_times(
    engine: Engine,
    trees: Mapping[Any, Tree],
    prefix_lengths: Sequence[int] = PREFIX_LENGTHS,
    repeats: int = REPEATS,
    batch_size: int = 1,
) -> dict[Any, float]:
    """Seconds of a step for each tree, under its own key, averaged over the prefix lengths.

    Key 1 is always there: plain decoding, one node. A batch is that many rows of one length.
    """
    assert engine.heads is not None
    context = engine.base.info.context_length
    prefix_lengths = [min(length, context // 2) for length in prefix_lengths]
    plain = PlainDrafter(engine.base.device)
    most = max(tree.num_nodes for tree in trees.values())
    places = [_Place(engine, length, most, batch_size) for length in prefix_lengths]
    ratios: dict[Any, float] = {}
    plain_times: list[float] = []
    with console.progress("timing steps", len(trees), "trees") as bar:
        for key, tree in sorted(trees.items(), key=lambda item: item[1].num_nodes):
            drafter = draft_with(engine.heads, tree) if tree.num_nodes > 1 else plain
            pack_for_rows(engine.base.model, tree.num_nodes * batch_size)
            pairs = [place.compare(drafter, plain, repeats) for place in places]
            ratios[key] = statistics.mean(ours / one for ours, one in pairs)
            plain_times += [one for _, one in pairs]
            bar.advance()
    one_node = statistics.median(plain_times)
    ratios[1] = 1.0
    return {key: one_node * ratio for key, ratio in ratios.items()}


class _Place:
    """A prefix of some length, from which steps are taken again and again."""

    def __init__(self, engine: Engine, prefix_length: int, max_nodes: int, batch_size: int) -> None:
        self.engine = engine
        generator = torch.Generator().manual_seed(prefix_length)
        shape, size = (batch_size, prefix_length), engine.base.info.vocab_size
        prompts = torch.randint(0, size, shape, generator=generator).tolist()
        self.cache: TreeCache = engine.verifier.new_cache(batch_size, prefix_length + max_nodes)
        hidden_BD, logits_BV = engine.verifier.prefill(self.cache, prompts)
        self.state = State(prompts, logits_BV.argmax(-1).tolist(), hidden_BD)

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
            torch.cuda.synchronize(self.engine.base.device)
        return time.perf_counter() - start

    def _step(self, drafter: Drafter) -> None:
        draft = drafter.propose(self.state)
        scores = self.engine.verifier.forward(
            self.cache, draft.tokens_BN, draft.depths_BN, draft.sees_BNN
        )
        likeliest_BN = scores.likeliest().tolist()
        tokens_BN = draft.tokens_BN.tolist()
        paths = []
        for topology, tokens, likeliest in zip(
            draft.topologies, tokens_BN, likeliest_BN, strict=True
        ):
            accept(tokens, topology.parents, likeliest.__getitem__, len(tokens))
            # Commit the costly case, the deepest path, and go back to the prefix.
            paths.append(path_to(int(topology.depths_N.argmax()), topology.parents))
        before = list(self.cache.lengths)
        self.cache.commit(paths)
        self.cache.lengths = before
