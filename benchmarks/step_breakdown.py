"""Where a decoding step's time goes, against the time that reading the weights once takes.

    python benchmarks/step_breakdown.py --model smollm2-135m-instruct --nodes 1 8

For each number of nodes: draft (heads), linear layers, attention, cache writes and commit,
acceptance, and the rest (norms, rotary embedding, Python). All in one run, medians over steps.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import medusa_kit
from medusa_kit import console
from medusa_kit.infer import attention
from medusa_kit.infer.acceptance import accept
from medusa_kit.infer.drafters import draft_with
from medusa_kit.infer.drafters.base import State
from medusa_kit.infer.drafters.plain import PlainDrafter
from medusa_kit.infer.packed_linear import pack_for_rows
from medusa_kit.infer.tree_cache import TreeCacheLayer
from medusa_kit.tree.candidate_tree import CandidateTree

PARTS = ("heads", "linear layers", "attention", "cache", "acceptance", "rest")
Spent = dict[str, float]


def timed(function: Callable[..., Any], part: str, spent: Spent) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - start

    return wrapper


@contextmanager
def instrumented(model: Any, spent: Spent) -> Iterator[None]:
    """Count the time spent in linear layers, attention and cache writes."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for layer in layers:
        layer.forward = timed(layer.forward, "linear layers", spent)
    tree_sdpa, update = attention.tree_sdpa, TreeCacheLayer.update
    attention.tree_sdpa = timed(tree_sdpa, "attention", spent)
    TreeCacheLayer.update = timed(update, "cache", spent)  # type: ignore[method-assign]
    try:
        yield
    finally:
        attention.tree_sdpa = tree_sdpa
        TreeCacheLayer.update = update  # type: ignore[method-assign]
        for layer in layers:
            del layer.forward


@torch.inference_mode()
def step_parts(engine: Any, tree: CandidateTree, prefix: int, repeats: int) -> Spent:
    """Median seconds of each part of a step of `tree` behind `prefix` tokens."""
    plain = tree.num_nodes == 1
    drafter = PlainDrafter(engine.base.device) if plain else draft_with(engine.heads, tree)
    pack_for_rows(engine.base.model, tree.num_nodes)
    cache = engine.verifier.new_cache(1, prefix + tree.num_nodes)
    prompt = torch.randint(0, engine.base.info.vocab_size, (prefix,)).tolist()
    hidden_BD, logits_BV = engine.verifier.prefill(cache, [prompt])
    state = State([prompt], [int(logits_BV.argmax())], hidden_BD)
    runs: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 2):
        spent: Spent = defaultdict(float)
        start = time.perf_counter()
        with instrumented(engine.base.model, spent):
            began = time.perf_counter()
            draft = drafter.propose(state)
            spent["heads"] = time.perf_counter() - began
            inside_heads = spent["linear layers"]
            _, logits_BNV = engine.verifier.forward(
                cache, draft.tokens_BN, draft.depths_BN, draft.sees_BNN
            )
            spent["linear layers"] -= inside_heads
            began = time.perf_counter()
            likeliest = logits_BNV.argmax(-1)[0].tolist()
            parents = draft.topologies[0].parents
            accept(draft.tokens_BN[0].tolist(), parents, likeliest.__getitem__, len(parents))
            spent["acceptance"] = time.perf_counter() - began
            began = time.perf_counter()
            cache.commit([[0]])
            spent["cache"] += time.perf_counter() - began
        whole = time.perf_counter() - start
        cache.lengths = [prefix]
        spent["rest"] = whole - sum(spent[part] for part in PARTS[:-1])
        if repeat >= 2:
            for part in PARTS:
                runs[part].append(spent[part])
            runs["whole step"].append(whole)
    return {part: statistics.median(values) for part, values in runs.items()}


def read_floor(model: Any, repeats: int = 9) -> float:
    """Seconds to read as many bytes as a step's linear layers hold, summing them up."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    weights = torch.ones(sum(layer.weight.numel() for layer in layers))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        weights.sum()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--heads", default="auto")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prefix", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    engine = medusa_kit.load(options.model, heads=options.heads)
    floor = read_floor(engine.base.model)
    columns = []
    for nodes in options.nodes:
        ranks = min(nodes - 1, 32)
        paths = [(rank,) for rank in range(ranks)] + [(0, r) for r in range(nodes - 1 - ranks)]
        columns.append(step_parts(engine, CandidateTree(paths), options.prefix, options.repeats))
    rows = [
        (part, *(f"{column[part] * 1e3:.1f}" for column in columns))
        for part in (*PARTS, "whole step")
    ]
    rows.append(("reading the weights once", *(f"{floor * 1e3:.1f}" for _ in columns)))
    title = f"{options.model}: ms of a step behind {options.prefix} tokens"
    heads = ("part", *(f"{nodes} nodes" for nodes in options.nodes))
    console.out.print(console.table(title, heads, rows))


if __name__ == "__main__":
    main()
