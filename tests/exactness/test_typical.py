"""Typical acceptance against its own rule, step by step in plain Python (arXiv 2401.10774, §2.3.1).

The reference asks a second model for the distribution after every path of every draft, by plain
forwards without a cache, and takes the longest path all of whose tokens pass. The rule is lossy, so
there is no answer of the base model to hold it to.
"""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.exact_distribution import log_probabilities
from support.small_engines import (
    build_engine,
    decode_all,
    endless_base,
    random_heads,
    random_prompt,
)

from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.verify import verify
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.shape import path_to

VOCAB, NODES, TOKENS = 8, 9, 24
SETTINGS = [
    SamplingParams(0.7, acceptance="typical"),
    SamplingParams(1.5, acceptance="typical", epsilon=0.25, delta=0.3),
    SamplingParams(1.0, acceptance="typical", epsilon=0.02, top_p=0.95, repetition_penalty=1.3,
                   presence_penalty=0.4, frequency_penalty=0.2, logit_bias={2: 1.0}),
]  # fmt: skip


def random_tree(committed: list[int], root: int) -> tuple[list[int], list[int]]:
    """(tokens, parents): a random tree of random tokens that the place alone decides."""
    draw = random.Random(str((committed, root)))
    parents = [-1, *(draw.randrange(node) for node in range(1, draw.randint(NODES // 2, NODES)))]
    return [root, *(draw.randrange(VOCAB) for _ in parents[1:])], parents


class RandomTrees(Drafter):
    name, num_nodes = "random-trees", NODES

    def propose(self, state: State) -> Forest:
        trees = [random_tree(*row) for row in zip(state.tokens, state.roots_B, strict=True)]
        tokens, parents = zip(*trees, strict=True)
        return Forest.of(tokens, parents, torch.device("cpu"))


def distribution(
    model: Any, params: SamplingParams, prompt: list[int], answer: list[int]
) -> list[float]:
    with torch.no_grad():
        logits_V = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, -1]
    return log_probabilities(logits_V, params, prompt, answer).exp().tolist()


def passes(probabilities: list[float], token: int, params: SamplingParams) -> bool:
    epsilon = 0.09 if params.epsilon is None else params.epsilon
    delta = math.sqrt(epsilon) if params.delta is None else params.delta
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    return probabilities[token] > min(epsilon, delta * math.exp(-entropy))


def likeliest(probabilities: list[float]) -> int:
    return probabilities.index(max(probabilities))


def by_hand(model: Any, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[int]]:
    """(answer, accepted depth of each step)."""
    answer, depths = [likeliest(distribution(model, params, prompt, []))], list[int]()
    while len(answer) < TOKENS:
        tokens, parents = random_tree([*prompt, *answer[:-1]], answer[-1])
        best, best_value = answer, (0, 0.0)
        for node in range(1, len(tokens)):
            path = path_to(node, parents)
            extended, log_likelihood, good = list(answer), 0.0, True
            for token in (tokens[n] for n in path[1:]):
                next_token = distribution(model, params, prompt, extended)
                good = good and passes(next_token, token, params)
                log_likelihood += math.log(next_token[token]) if next_token[token] else -math.inf
                extended.append(token)
            value = (len(path) - 1, log_likelihood)
            if good and value > best_value:
                best, best_value = extended, value
        answer = [*best, likeliest(distribution(model, params, prompt, best))]
        depths.append(best_value[0])
    return answer[:TOKENS], depths


def test_a_batch_of_random_trees_against_the_reference() -> None:
    engine, model = build_engine(endless_base(VOCAB)), endless_base(VOCAB).model
    prompts = [random_prompt(length, length, VOCAB) for length in (2, 11, 5)]
    rows = decode_all(engine, RandomTrees(), prompts, TOKENS, SETTINGS)
    deepest = 0
    for row, prompt, params in zip(rows, prompts, SETTINGS, strict=True):
        answer, depths = by_hand(model, prompt, params)
        assert row.token_ids == answer
        assert row.num_steps == len(depths)
        deepest = max(deepest, *depths)
    assert deepest >= 3
    seeds = [replace(params, seed=9) for params in SETTINGS]
    again = decode_all(engine, RandomTrees(), prompts, TOKENS, seeds)
    assert [row.token_ids for row in again] == [row.token_ids for row in rows]  # nothing is drawn


@pytest.fixture(scope="module")
def engine() -> Engine:
    base = endless_base(VOCAB)
    tree = CandidateTree([(a,) for a in range(4)] + [(a, b) for a in range(4) for b in range(3)])
    return build_engine(base, heads=random_heads(base, num_heads=2), tree=tree)


def test_alone_it_is_greedy_and_with_heads_faster_than_exact(engine: Engine) -> None:
    """Without guesses there is nothing but the greedy root; the likeliest token always passes, so
    no fewer guesses hold than with a greedy rule."""
    prompt = random_prompt(6, 1, VOCAB)
    device = engine.base.device
    plain = decode_all(engine, PlainDrafter(device), [prompt], TOKENS, [SETTINGS[0]])
    greedy = engine.generate(prompt, max_new_tokens=TOKENS)
    assert plain[0].token_ids == greedy.token_ids
    options = {"temperature": 1.2, "acceptance": "typical", "epsilon": 0.2}
    typical = engine.generate(prompt, max_new_tokens=TOKENS, **options)
    assert typical.stats.acceptance_length > greedy.stats.acceptance_length
    assert typical.token_ids != greedy.token_ids
    streaming = engine.stream(prompt, max_new_tokens=TOKENS, drafter="none", **options)
    assert (streaming.result.stats.acceptance, streaming.result.stats.lossy) == ("typical", True)


def test_statistics_say_that_it_is_lossy(engine: Engine) -> None:
    prompt = random_prompt(6, 1, VOCAB)
    for options, acceptance in (({}, "exact"), ({"acceptance": "typical"}, "typical")):
        stats = engine.generate(prompt, max_new_tokens=4, temperature=0.7, **options).stats
        assert (stats.acceptance, stats.lossy) == (acceptance, acceptance == "typical")
        assert stats.as_dict()["lossy"] is stats.lossy


def test_there_is_nothing_to_verify(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="lossy, so there is nothing to verify"):
        verify(engine, Oracle(endless_base(VOCAB)), [[5]], sampling=SETTINGS[0])
