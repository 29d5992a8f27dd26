"""Where a decoding step's time goes for trees of several sizes, after a prefix of some length.

    python benchmarks/step_breakdown.py --model smollm2-135m-instruct --nodes 1 8

`medusa-kit bench --breakdown` does the same for the trees in use. The measuring is done by
medusa_kit/bench/breakdown.py.
"""

import argparse

import torch

import medusa_kit
from medusa_kit import console
from medusa_kit.bench.breakdown import Breakdown, break_down
from medusa_kit.bench.report import ONE_NODE
from medusa_kit.cli.bench_report import breakdown_table
from medusa_kit.tree.candidate_tree import CandidateTree


def bushy_tree(nodes: int) -> CandidateTree:
    """Up to 32 guesses of the first head, the other nodes below its best one."""
    ranks = min(nodes - 1, 32)
    return CandidateTree(
        [(rank,) for rank in range(ranks)] + [(0, rank) for rank in range(nodes - 1 - ranks)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--heads", default="auto")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prefix", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()
    engine = medusa_kit.load(options.model, heads=options.heads)
    generator = torch.Generator().manual_seed(0)
    size = (options.prefix,)
    prompt = torch.randint(0, engine.base.info.vocab_size, size, generator=generator).tolist()
    columns: dict[str, Breakdown] = {}
    for nodes in options.nodes:
        name = ONE_NODE
        if nodes > 1:
            engine.use_tree(bushy_tree(nodes))
            name = "drafting"
        measured = break_down({"drafting": engine}, [prompt], options.new_tokens)
        if name in measured:
            columns[f"{nodes} nodes"] = measured[name]
    title = f"{options.model}, {engine.verifier.steps_run_by}, after {options.prefix} tokens"
    console.out.print(breakdown_table(columns, title))


if __name__ == "__main__":
    main()
