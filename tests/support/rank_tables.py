"""Random rank statistics for tests, written answer by answer as their definition reads."""

import numpy as np

from medusa_kit.tree.statistics import RankStatistics


def random_statistics(
    seed: int, lengths: list[int], num_heads: int = 3, num_ranks: int = 3, missing: float = 0.2
) -> RankStatistics:
    """Low ranks more often than high ones; a share `missing` of the true tokens is not found."""
    rng = np.random.default_rng(seed)
    rows, starts = [], []
    for length in lengths:
        starts.append(len(rows))
        for p in range(length):
            row = []
            for k in range(num_heads):
                rank = min(rng.geometric(0.5) - 1, num_ranks - 1)
                rank = 32767 if rng.random() < missing else rank
                row.append(rank if p + 1 + k < length else -1)
            rows.append(row)
    ranks_PK = np.array(rows, dtype=np.int64).reshape(len(rows), num_heads)
    return RankStatistics(ranks_PK, np.array(starts), num_ranks, {"base": f"seed {seed}"})
