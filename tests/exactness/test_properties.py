"""Properties that hold for any tree, any batch and any kept path, searched by hypothesis.

Shapes: B batch, N nodes with root, L slots in sight.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_inputs import inputs_of
from support.small_engines import build_engine, endless_base
from support.tiny_models import tiny_base

from medusa_kit.engine.engine import Engine
from medusa_kit.infer.attention.step import TreeStep
from medusa_kit.infer.decode.accept.rules import accept
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.shape import path_to

CPU = torch.device("cpu")
VOCAB = 8  # so few tokens that blind guesses are often right
COMMON = {"deadline": None, "derandomize": True}


@st.composite
def parents(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """A tree of `size` nodes; parents come before their children."""
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))


@st.composite
def forests(draw: st.DrawFn, rows: int) -> list[tuple[int, ...]]:
    """A tree for each row."""
    return [draw(st.integers(1, 7).flatmap(parents)) for _ in range(rows)]


def step_of(lengths: Sequence[int], trees: Sequence[Sequence[int]]) -> TreeStep:
    return TreeStep(lengths, *inputs_of(trees))


def seen_slots(length: int, tree: Sequence[int], node: int, window: int | None) -> set[int]:
    """The text that leads to a node as a list of slots; a window keeps the newest of them."""
    path = path_to(node, tree) if node < len(tree) else [node]  # a node that pads sees itself
    text = [*range(length), *(length + n for n in path)]
    return set(text if window is None else text[-window:])


@settings(max_examples=150, **COMMON)
@given(st.data())
def test_the_mask_is_the_set_of_ancestors(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4), "lengths")
    trees = data.draw(forests(len(lengths)), "trees")
    window = data.draw(st.none() | st.integers(1, 20), "window")
    step = step_of(lengths, trees)
    mask_B1NL = step.mask(window)
    largest = max(map(len, trees))
    assert mask_B1NL.shape == (len(lengths), 1, largest, max(lengths) + largest)
    for row, (length, tree) in enumerate(zip(lengths, trees, strict=True)):
        for node in range(largest):
            found = set(mask_B1NL[row, 0, node].nonzero().flatten().tolist())
            assert found == seen_slots(length, tree, node, window)
    added = step.additive_mask(window, 1, torch.float32)
    assert torch.equal(added == 0, mask_B1NL)
    assert torch.equal(added == float("-inf"), ~mask_B1NL)
    assert step.sees_all(window) <= bool(mask_B1NL.all())


@cache
def verifier_of(family: str) -> Verifier:
    return Verifier(tiny_base(family))


def kept_path(data: st.DataObject, tree: Sequence[int]) -> list[int]:
    return path_to(data.draw(st.integers(0, len(tree) - 1), "last node kept"), tree)


@settings(max_examples=25, **COMMON)
@given(st.sampled_from(["mistral-sliding", "gpt2", "deepseek_v3"]), st.data())
def test_after_commits_the_cache_is_that_of_a_fresh_prompt(
    family: str, data: st.DataObject
) -> None:
    """Every slot's keys and values, and the logits that come of them."""
    verifier, draw = verifier_of(family), random.Random(data.draw(st.integers(0, 99), "seed"))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), "lengths")
    texts = [[draw.randrange(96) for _ in range(length)] for length in lengths]
    cache = verifier.new_cache(len(texts), 64)
    verifier.read_prompts(cache, range(len(texts)), texts)
    for _ in range(data.draw(st.integers(1, 3), "steps")):
        trees = data.draw(forests(len(texts)), "trees")
        tokens = [[draw.randrange(96) for _ in tree] for tree in trees]
        nodes = Forest.of(tokens, trees, CPU)
        verifier.score(cache, nodes, range(len(texts)))
        kept = [kept_path(data, tree) for tree in trees]
        cache.commit(kept)
        for text, row, nodes in zip(texts, tokens, kept, strict=True):
            text += [row[node] for node in nodes]
    assert cache.lengths == [len(text) for text in texts]
    fresh = verifier.new_cache(len(texts), 64)
    verifier.read_prompts(fresh, range(len(texts)), texts)
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        for row, text in enumerate(texts):
            for kind in ("keys", "values"):
                a, b = (getattr(layer, kind)[row, :, : len(text)] for layer in (ours, theirs))
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    roots = Forest.chains([[0]] * len(texts), CPU)
    logits = [verifier.score(c, roots, range(len(texts))).logits_NV for c in (cache, fresh)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@settings(max_examples=200, **COMMON)
@given(st.data())
def test_accept_takes_as_much_of_plain_decoding_as_the_tree_holds(data: st.DataObject) -> None:
    """The reference decodes one token after the other and knows no tree."""
    tree = data.draw(st.integers(1, 10).flatmap(parents), "tree")
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=len(tree), max_size=len(tree)))
    max_depth = data.draw(st.integers(0, 4), "max depth")
    salt = data.draw(st.integers(0, 999), "model")

    def model(text: Sequence[int]) -> int:
        return random.Random(f"{salt} {text}").randrange(3)

    plain = [tokens[0]]
    while len(plain) < len(tree) + 2:
        plain.append(model(plain))

    def text_of(node: int) -> list[int]:
        return [tokens[n] for n in path_to(node, tree)]

    path, follower = accept(tokens, tree, lambda node: model(text_of(node)), max_depth)
    last = path[-1] if path else 0
    assert path_to(last, tree) == [0, *path]
    assert [*text_of(last), follower] == plain[: len(path) + 2]
    # Maximal, though not the longest where siblings hold the same token.
    children = [n for n, p in enumerate(tree) if p == last and tokens[n] == follower]
    assert len(path) == max_depth or not children


class Blind(Drafter):
    """Random tokens in one given tree after the other, another order for each row."""

    name = "blind"

    def __init__(self, trees: Sequence[tuple[int, ...]], seed: int) -> None:
        self.trees, self.random = trees, random.Random(seed)
        self.num_nodes = max(len(tree) for tree in trees)

    def propose(self, state: State) -> Forest:
        chosen = [self.random.choice(self.trees) for _ in state.requests]
        rows = [[root, *(self.random.randrange(VOCAB) for _ in tree[1:])]
                for root, tree in zip(state.roots_B, chosen, strict=True)]  # fmt: skip
        return Forest.of(rows, chosen, CPU)


@cache
def plain_text(prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    out = endless().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@cache
def endless() -> Any:
    return endless_base(VOCAB).model


@cache
def engine() -> Engine:
    return build_engine(endless_base(VOCAB))


@settings(max_examples=30, **COMMON)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), st.integers(1, 14)),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.integers(1, 9).flatmap(parents), min_size=1, max_size=4),
    st.none() | st.integers(0, VOCAB - 1),
    st.integers(0, 99),
)
def test_decoding_with_blind_guesses_is_plain_decoding(
    asked: list[tuple[list[int], int]], trees: list[tuple[int, ...]], stop: int | None, seed: int
) -> None:
    engine().base.model.generation_config.eos_token_id = stop
    rows = [
        make_request(engine().verifier, prompt, SamplingParams(), limit) for prompt, limit in asked
    ]
    for _ in Scheduler(engine().verifier).run(rows, Blind(trees, seed)):
        pass
    for row, (prompt, limit) in zip(rows, asked, strict=True):
        expected = plain_text(tuple(prompt))[:limit]
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
        assert row.token_ids == expected
        assert row.num_steps <= len(row.token_ids) - 1
        assert row.finish_reason == ("stop" if stop in expected else "length")
