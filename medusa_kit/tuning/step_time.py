"""How long a whole step takes on this machine for N nodes: draft, verify, accept, commit.

Timings jitter, so each size is measured next to one-node steps, and its ratio to those counts.
A machine may be slow for a tenth of a second, so where nothing is packed anew for a size, all sizes
take turns in several rounds, and the median over these counts.
Since a prompt takes as long as many steps, steps are repeated from the same prefix.

Shapes: B batch, N nodes with root.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.drafters import draft_with
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.accept.rules import accept
from medusa_kit.infer.chains.cache import ChainCache
from medusa_kit.infer.cpu.mkl_linear import pack_for_rows
from medusa_kit.infer.draft import Drafter, State, flat_nodes, path_to
from medusa_kit.infer.node_choice.measured import IN_A_ROW, SETTLED
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.no_gradients import no_gradients
from medusa_kit.tree.plan import Tree

PREFIX_LENGTHS = (64, 384)
REPEATS, ROUNDS = 7, 9


@no_gradients
def measure_step_times(
    engine: Engine,
    trees: Mapping[Any, Tree],
    prefix_lengths: Sequence[int] = PREFIX_LENGTHS,
    repeats: int = REPEATS,
    batch_size: int = 1,
    num_unread: int = 0,
) -> dict[Any, float]:
    """Seconds of a step for each tree, under its own key, averaged over the prefix lengths.

    Key 1 is always there: plain decoding, one node. A batch is that many rows of one length.
    `num_unread`: tokens that steps read in front of a chain (infer/chains/).
    """
    assert engine.heads is not None
    context = engine.base.info.context_length
    prefix_lengths = [min(length, context // 2) for length in prefix_lengths]
    plain = PlainDrafter(engine.base.device)
    most = max(tree.num_nodes for tree in trees.values()) + num_unread
    places = [_Place(engine, length, most, batch_size) for length in prefix_lengths]
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
                pack_for_rows(engine.base, trees[key].num_nodes * batch_size)
                count = -(-repeats // rounds)
                unread = num_unread if trees[key].num_nodes > 1 else 0
                pairs = [(place.median(drafter, count, unread), place.median(plain, count))
                         for place in places]  # fmt: skip
                ratios[key].append(statistics.mean(ours / one for ours, one in pairs))
                plain_times += [one for _, one in pairs]
                bar.advance()
    one_node = statistics.median(plain_times)
    found = {key: one_node * statistics.median(several) for key, several in ratios.items()}
    return {**found, 1: one_node}


class _Place:
    """A prefix from which steps of the loop are repeated."""

    def __init__(self, engine: Engine, prefix_length: int, max_nodes: int, batch_size: int) -> None:
        self.engine = engine
        prompts = _random_prompts(engine, prefix_length, batch_size)
        self.cache: TreeCache = engine.verifier.new_cache(batch_size, prefix_length + max_nodes)
        hidden_BD, logits_BV = engine.verifier.read_prompts(self.cache, range(batch_size), prompts)
        self.state = State(prompts, logits_BV.argmax(-1).tolist(), hidden_BD)
        self.unread = list[int]()

    def median(self, drafter: Drafter, repeats: int, num_unread: int = 0) -> float:
        """Seconds of steps in a row, as in decoding, behind some that do not count: for some
        milliseconds after a large step a small one takes longer."""
        self.unread = self.state.tokens[0][:num_unread]
        self._step(drafter)  # packs, warms up
        settled = 0.0
        for _ in range(IN_A_ROW):
            settled += self._timed(drafter)
            if settled > SETTLED:
                break
        return statistics.median(self._timed(drafter) for _ in range(max(repeats, 2)))

    def _timed(self, drafter: Drafter) -> float:
        start = time.perf_counter()
        self._step(drafter)
        if self.engine.base.device.type == "cuda":
            torch.cuda.synchronize(self.engine.base.device)
        return time.perf_counter() - start

    def _step(self, drafter: Drafter) -> None:
        draft = drafter.propose(self.state)
        if isinstance(self.cache, ChainCache):
            self.cache.unread = [list(self.unread) for _ in self.cache.unread]
        nodes = flat_nodes([draft])
        scores = self.engine.verifier.score(self.cache, nodes, range(len(nodes.counts)))
        flat = scores.likeliest().tolist()
        ends = list(accumulate(nodes.counts))
        likeliest_BN = [flat[end - n : end] for end, n in zip(ends, nodes.counts, strict=True)]
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
        self.cache.lengths = before  # a state is left where it is: times do not depend on it


def _random_prompts(engine: Engine, length: int, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    size = engine.base.info.vocab_size
    prompts: list[list[int]] = torch.randint(0, size, (count, length), generator=generator).tolist()
    return prompts
