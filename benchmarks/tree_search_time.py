"""Times the tree search itself, from rank statistics to the best trees, without a model.

    python benchmarks/tree_search_time.py --heads 5 --ranks 10 --positions 50000

Statistics are random, about as good as those of trained heads. Prints processor seconds of one
thread, which are valid on a busy machine too.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from medusa_kit.tree.search import best_trees, ranked_paths
from medusa_kit.tree.statistics import MISSING, NOT_AVAILABLE, RankStatistics

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ANSWER = 200  # tokens


def random_statistics(heads: int, ranks: int, positions: int) -> RankStatistics:
    answers = positions // ANSWER
    shape = (answers * ANSWER, heads)
    ranks_PK = np.random.default_rng(0).geometric(0.35, shape) - 1
    ranks_PK[ranks_PK >= ranks] = MISSING
    left_P = np.tile(ANSWER - np.arange(ANSWER), answers)
    ranks_PK[left_P[:, None] <= np.arange(1, heads + 1)] = NOT_AVAILABLE
    return RankStatistics(ranks_PK, np.arange(answers) * ANSWER, ranks)


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=10)
    parser.add_argument("--positions", type=int, default=50_000)
    options = parser.parse_args()
    statistics = random_statistics(options.heads, options.ranks, options.positions)
    fit, held_out = statistics.split(0.25, seed=0)
    most = max(SIZES)
    print(f"one sorting, {most} nodes: {seconds(lambda: ranked_paths(fit, most)):.3f} s")
    print(
        f"best of {most} nodes, smoothing, reweighting and replay included: "
        f"{seconds(lambda: best_trees(fit, [most], held_out)):.3f} s"
    )
    print(f"best of {SIZES} nodes: {seconds(lambda: best_trees(fit, SIZES, held_out)):.3f} s")


if __name__ == "__main__":
    main()
