"""Guesses of heads blended with the row's own text, against counts made by plain loops."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.small_engines import build_engine, decode_all, endless_base, random_heads
from support.states import state_from

from medusa_kit.drafters.heads import copying
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.drafters.heads.copying import RowText, with_copies, with_copies_after
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.dynamic import DynamicTree

SMOOTHING = (5.0, 2.0, 0.5)
VOCAB = 16


def expected_chance(
    token: int, score: float, text: list[int], path: list[int], smoothing: tuple[float, ...]
) -> float:
    """The formula of copying.py, written out from the longest match down."""
    whole = [*text[:-1], *path]

    def chance(length: int) -> float:
        if length == 0:
            return math.exp(score)
        ending = whole[len(whole) - length :] if length <= len(whole) else None
        after = [
            text[end] for end in range(length, len(text)) if text[end - length : end] == ending
        ]
        if not after:
            return chance(length - 1)
        weight = len(set(after)) * smoothing[length - 1]
        return (after.count(token) + weight * chance(length - 1)) / (len(after) + weight)

    return chance(len(smoothing))


@pytest.mark.parametrize("seed", range(20))
def test_chances_are_those_of_the_formula(seed: int) -> None:
    drawn = random.Random(seed)
    text = drawn.choices(range(4), k=drawn.choice([1, 2, 5, 60]))
    path = [text[-1], *drawn.choices(range(4), k=seed % 4)]
    guesses = [(0, -0.4), (2, -1.5), (9, -2.0)]
    found = with_copies(guesses, np.array(text), path, SMOOTHING)
    assert [token for token, _ in found[:3]] == [0, 2, 9]
    for token, score in found:
        own = dict(guesses).get(token, -math.inf)
        assert math.exp(score) == pytest.approx(expected_chance(token, own, text, path, SMOOTHING))
    more = [token for token, _ in found[3:]]
    followed = {b for a, b in pairwise(text) if a == path[-1]}
    assert set(more) == followed - {0, 2, 9}
    assert [score for _, score in found[3:]] == sorted((s for _, s in found[3:]), reverse=True)


def test_chances_of_all_tokens_still_sum_to_one() -> None:
    heads = [(token, math.log(1 / 8)) for token in range(8)]
    text = np.array([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2])
    found = with_copies(heads, text, [2], SMOOTHING)
    assert sum(math.exp(score) for _, score in found) == pytest.approx(1.0)
    assert max(found, key=lambda one: one[1])[0] == 4  # after 3, 1, 2; more often 3 after 1, 2


def test_only_the_likeliest_followers_and_the_newest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.array([number for token in range(1, 13) for number in (0, token)] + [0, 1, 0])
    heads = [(token, -math.inf) for token in range(20, 28)]
    found = with_copies(heads, text, [0], (1.0,))[8:]
    assert len(found) == 8  # as many as the heads have
    assert found[0][0] == 1  # twice
    assert [token for token, _ in found[1:]] == [2, 3, 4, 5, 6, 7, 8]  # of equal ones the lowest
    monkeypatch.setattr(copying, "MAX_MATCHES", 2)
    assert {token for token, _ in with_copies(heads, text, [0], (1.0,))[8:]} == {1, 12}
    monkeypatch.setattr(copying, "MAX_MATCHES", 1)
    assert {token for token, _ in with_copies(heads, text, [0], (1.0,))[8:]} == {1}


def test_tokens_that_are_not_there_have_no_chance() -> None:
    ids, scores = torch.tensor([[[4]], [[5]]]), torch.tensor([[[-0.5]], [[-0.5]]])
    texts = [np.array([3, 7, 3]), None]
    ids, scores = with_copies_after(ids, scores, texts, torch.tensor([[[3]], [[3]]]), (1.0,))
    assert ids[:, 0, :2].tolist() == [[4, 7], [5, 0]]
    assert scores[0, 0, :2].exp().tolist() == pytest.approx([math.exp(-0.5) / 2, 0.5])
    assert scores[1, 0, 0].item() == -0.5
    assert torch.isinf(scores[1, 0, 1:]).all()
    assert torch.isinf(scores[0, 0, 2:]).all()


def test_a_text_is_read_on_and_grows() -> None:
    text, long = RowText(), [1, 2, 3, 9, *range(3000)]
    assert text.read([1, 2], 3).tolist() == [1, 2, 3]
    assert text.read([1, 2, 3, 9], 8).tolist() == [1, 2, 3, 9, 8]
    for _ in range(2):
        assert text.read([1, 2, 3, 9, 8, *long], 7).tolist() == [1, 2, 3, 9, 8, *long, 7]


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_decoding_is_exact_and_copies(kind: str) -> None:
    """Of a text that repeats itself the copying tree takes more at a step; greedy and sampled rows
    are what they are without."""
    base = endless_base(VOCAB, torch.float64)
    engine = build_engine(base, heads=random_heads(base, kind=kind))
    prompts = [[1, 5, 9, 2, 7] * 4, [3, 4], [8, 1, 8, 1, 1]]
    settings = [SamplingParams(), SamplingParams(0.9, seed=3), SamplingParams()]
    plain = [
        decode_all(engine, engine.drafter_for("none"), [prompt], 60, [params])[0]
        for prompt, params in zip(prompts, settings, strict=True)
    ]
    steps = {}
    for smoothing in ((), SMOOTHING):
        engine.use_tree(DynamicTree(6, (1.0, 1.0, 1.0), 5, 3, smoothing))
        rows = decode_all(engine, engine.drafter_for(None, batch_size=3), prompts, 60, settings)
        assert [row.token_ids for row in rows] == [row.token_ids for row in plain]
        steps[smoothing] = [sum(row.depth_counts.values()) for row in rows]
    assert steps[SMOOTHING][0] + steps[SMOOTHING][2] < steps[()][0] + steps[()][2]


def test_a_follower_that_heads_do_not_name_is_drafted() -> None:
    heads = random_heads(endless_base(VOCAB), kind="hydra")
    drafter = draft_with(heads, DynamicTree(3, (1.0, 1.0), 1, 3, (0.01, 0.01)))
    assert isinstance(drafter, DynamicDrafter)
    state = state_from([[6, 11, 12, 6, 11, 12]], [6], torch.zeros(1, heads.config.hidden_size))
    draft = drafter.propose(state)
    assert draft.token_lists() == [[6, 11, 12]]
    assert draft.shapes[0].parents == (-1, 0, 1)
