"""Rank statistics against ranks found by sorting, one answer and one position at a time."""

from typing import Any

import pytest
import torch
from support.small_engines import random_heads, random_prompt
from support.tiny_models import CONTEXT, VOCAB, tiny_base

from medusa_kit.base.model import BaseModel
from medusa_kit.data.readers import AnswerRow
from medusa_kit.errors import DataError
from medusa_kit.heads import MedusaHeads
from medusa_kit.tree.statistics import MISSING, NOT_AVAILABLE
from medusa_kit.tuning import calibrate as module
from medusa_kit.tuning.calibrate import calibrate, tokens_ahead


def answer(prompt: list[int], response: list[int], name: str = "x") -> AnswerRow:
    return AnswerRow(prompt, response, "length", name, 1)


def some_answers() -> list[AnswerRow]:
    sizes = [(7, 9), (1, 1), (20, 30), (3, 2), (12, 9)]
    return [
        answer(random_prompt(a, i), random_prompt(b, 100 + i)) for i, (a, b) in enumerate(sizes)
    ]


@torch.inference_mode()
def ranks_by_sorting(
    base: BaseModel, heads: MedusaHeads, one: AnswerRow, num_ranks: int
) -> list[list[int]]:
    """Hidden states from the whole text, unpadded; guesses of each head listed best first."""
    ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
    hidden = base.hidden_states(ids, torch.ones_like(ids))[0]
    rows = []
    for p in range(len(one.response_ids)):
        before = hidden[len(one.prompt_ids) - 1 + p][None]
        row = []
        for k in range(heads.num_heads):
            if p + 1 + k >= len(one.response_ids):
                row.append(NOT_AVAILABLE)
                continue
            path = torch.tensor([one.response_ids[p : p + k + 1]])
            order = heads.candidates_after(k, before, path, heads.num_columns)[0].tolist()
            truth = one.response_ids[p + 1 + k]
            rank = order.index(truth) if truth in order else MISSING
            row.append(rank if rank < num_ranks else MISSING)
        rows.append(row)
    return rows


KINDS: list[dict[str, Any]] = [
    {"kind": "medusa"}, {"kind": "hydra"},
    {"kind": "recurrent"},
]  # fmt: skip


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: " ".join(map(str, kinds.values())))
@pytest.mark.parametrize("projection", ["shared", "reduced"])
def test_ranks_are_places_in_the_sorted_guesses(
    projection: str, kinds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_TOKENS", 70)  # several batches, some of them padded
    base = tiny_base("llama", dtype=torch.float64)
    reduced = torch.arange(0, VOCAB, 2) if projection == "reduced" else None
    heads = random_heads(base, projection=projection, reduced_ids=reduced, **kinds)
    answers = some_answers()
    statistics = calibrate(base, heads, answers, num_ranks=20)
    assert statistics.lengths().tolist() == [len(a.response_ids) for a in answers]
    expected = [row for a in answers for row in ranks_by_sorting(base, heads, a, 20)]
    assert statistics.ranks_PK.tolist() == expected
    assert any(0 <= rank < 20 for row in expected for rank in row)


def test_targets_of_a_short_answer() -> None:
    assert tokens_ahead([7, 8, 9], 2).tolist() == [[7, 8, 9], [8, 9, -1], [9, -1, -1]]


def test_answers_that_do_not_fit_are_left_out(llama: BaseModel) -> None:
    heads = random_heads(llama)
    good = answer([5, 6], [7, 8, 9])
    long, empty = answer([5] * CONTEXT, [7]), answer([5], [])
    statistics = calibrate(llama, heads, [long, good, empty])
    assert (statistics.num_answers, statistics.num_positions) == (1, 3)
    with pytest.raises(DataError, match="none of the 2 answers"):
        calibrate(llama, heads, [long, empty])
    with pytest.raises(DataError, match=f"holds the token id {VOCAB}; the model has ids 0 to"):
        calibrate(llama, heads, [good, answer([5], [VOCAB])])


def test_the_statistics_say_where_they_come_from(llama: BaseModel) -> None:
    meta = calibrate(llama, random_heads(llama), some_answers()).meta
    assert meta["base_fingerprint"] == llama.info.fingerprint
    assert meta["num_answers"] == 5


def test_the_statistics_are_of_the_weights_as_they_are_now() -> None:
    base = tiny_base("llama")
    before = calibrate(base, random_heads(base), some_answers()).meta
    base.model.get_input_embeddings().weight.data.mul_(1.5)
    after = calibrate(base, random_heads(base), some_answers()).meta
    assert before["base_fingerprint"] != after["base_fingerprint"] == base.info.fingerprint
